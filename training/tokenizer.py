"""The tiny policy's tokenizer: 512 byte-level pieces with Qwen3's control tokens.

Digits, operators and brackets are split off before the merges are learned, so each is a separate token. A number can be
copied digit by digit, and a bracket is never merged with a digit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout_service.environments.builtin.calc.problems import make_problem
from training.prompts import CALL_FAILURES, TOOL_FAILURES, TOOLS_TEXT, random_setup

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


def build_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Learn the merges and write `tokenizer.json` and `tokenizer_config.json` into the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9+\-*/().=]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
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


def _corpus(setups: int = 600) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(setups):
        problem = make_problem(rng)
        system, tools = random_setup(rng)
        yield f"system\n{system}\n\n{TOOLS_TEXT}\n" + "\n".join(map(json.dumps, tools))
        yield f"user\n{problem['question']}"
        yield f'assistant\n{{"name": "python", "arguments": {{"code": "print({problem["expression"]})"}}}}\n'
        yield f"\n{problem['answer']}\n\\boxed{{{problem['answer']}}}"
        yield rng.choice(TOOL_FAILURES + CALL_FAILURES)
