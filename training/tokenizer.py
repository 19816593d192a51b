"""The tokenizers of the tiny policies: byte-level pieces with Qwen3's control tokens.

What is to be copied piece by piece, such as digits, is split off before the merges are learned, so it never merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
MAX_POSITIONS = 2048


TOOLS_TEXT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
"""Qwen3's own text around tools, for learning the merges; the renderer writes it into prompts."""


def build_tokenizer(folder: Path, corpus: Iterable[str], vocab_size: int, isolated: str, *, within_words: bool) -> None:
    """Learn the merges, and write `tokenizer.json` and `tokenizer_config.json` into the folder.

    `isolated` is a pattern of what never merges. Without `within_words`, a piece may be a whole phrase.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(isolated), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=within_words),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        # As in Qwen3, only <|...|> are special; otherwise, decoding without special tokens would lose tool calls.
        token["special"] = token["content"].startswith("<|")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), ensure_ascii=False, indent=1))


def _config() -> dict[str, object]:
    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name known to transformers 4 and 5
        "model_max_length": MAX_POSITIONS,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": template.rstrip("\n"),
    }
