"""Stand-ins for models' tokenizers: byte-level BPE with a chat format's control tokens in its vocabulary.

Tests of the token layer need no real tokenizer: its guarantees are about ids and control tokens, not about the merges
of a vocabulary. The stand-ins have merges of English, code and control characters, so texts that are joined before they
are encoded do merge across their borders. A chat format asks for its control tokens when it is made, which is how they
are found here; it writes a few only as text.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from renderers import create_renderer
from renderers.configs import _CONFIG_BY_NAME
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer
from tests.support.tokens.harmony import HarmonyStandIn

FAMILIES = sorted(set(_CONFIG_BY_NAME) - {"auto", "default"})
"""All handwritten chat formats."""

_OWN_VOCABULARY = ("gpt-oss", "default")
_THINK = ["<think>", "</think>"]
_WRITTEN = {
    "gemma4": ['<|"|>'],
    "deepseek-v3": _THINK,
    "deepseek-r1": _THINK,
    "kimi-k2": _THINK,
    "kimi-k2.5": _THINK,
    "llama-3": ["<|python_tag|>"],
    "gpt-oss": [
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
    ],
    "default": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *_THINK, "<tool_call>", "</tool_call>"],
}
_CORPUS = [
    'The quick brown fox: user\n\nassistant\n system\n tool\n {"name": "python", "arguments": {"code": 1}}',
    "def main() -> None:\n    print('hello world')\n\n\n<think>\n\n</think>\n\n<|im_end|>\n<tool_response>\n",
    "parallel calls, results and reasoning: \n\n\t<user> </user> <assistant> </assistant> > < | </ <| |> >>",
]


class _Recorder:
    """A tokenizer that only records the tokens that it is asked for."""

    name_or_path = ""
    unk_token_id = None
    eos_token_id = None

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.tokens.setdefault(token, len(self.tokens))

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.convert_tokens_to_ids(text)]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(list(self.tokens)[i] for i in ids)

    def __len__(self) -> int:
        return len(self.tokens)


@cache
def control_tokens(family: str) -> tuple[str, ...]:
    """Return the control tokens of a chat format."""
    recorder = _Recorder()
    if family not in _OWN_VOCABULARY:
        create_renderer(recorder, _CONFIG_BY_NAME[family]())
    asked = [token for token in recorder.tokens if not token.endswith("\n")]
    partners = [token.replace("</", "<") for token in asked if token == "</think>"]
    return tuple(dict.fromkeys([*asked, *partners, *_WRITTEN.get(family, ())]))


def is_special(token: str) -> bool:
    """Return whether the stand-ins mark a token as special; like models' tokenizers, they mark framing, not tags."""
    return token.startswith(("<|", "[", "<bos", "<eos", "<\uff5cbegin", "<\uff5cend"))


@cache
def _trained() -> str:
    """Return the vocabulary that all stand-ins have in common."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=450, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer.to_str()


def write_tokenizer(folder: Path, control: tuple[str, ...]) -> Path:
    """Write a `tokenizer.json` to a folder; return the folder."""
    content = json.loads(_trained())
    first = len(content["model"]["vocab"])
    content["added_tokens"] = [
        {
            "id": first + i,
            "content": token,
            "special": is_special(token),
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, token in enumerate(control)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def load(folder: Path, family: str, **options: object) -> ChatRenderer:
    """Load a chat format with its stand-in, which is written to the folder if it is not there."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, control_tokens(family))
    with patch("renderers.gpt_oss.load_harmony_encoding", lambda _: HarmonyStandIn(folder)):
        return ChatRenderer.load(folder, family, options)


def write_model(folder: Path, template: str, eos: str = "<|im_end|>") -> Path:
    """Write a model whose chat format is known only by its template; return its folder."""
    write_tokenizer(folder, control_tokens("default"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@cache
def hub_tokenizer() -> Any:
    """Return the tokenizer of a shipped policy as transformers loads it."""
    from transformers import PreTrainedTokenizerFast  # takes a second, and AutoTokenizer four, for torch

    return PreTrainedTokenizerFast.from_pretrained(policy_folder("calc-tuned"))


shared = cache(load)
"""Loads a format once: a renderer keeps nothing of what it renders or reads."""
