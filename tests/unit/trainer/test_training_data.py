"""The tiny policies are taught turns as a rollout plays them, with the requested share of guesses."""

import re
from itertools import islice

import pytest

from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer
from training.data import Example, Examples

TUNED = policy_folder("calc-tuned")


def learned(example: Example) -> str:
    """Return the text that the policy is taught to write."""
    ids = [token for token, bit in zip(example.token_ids, example.loss_mask, strict=True) if bit]
    return ChatRenderer.load(TUNED).decode(ids)


def some(guesses: float, count: int = 4) -> list[str]:
    batches = islice(Examples(TUNED, 3, guesses=guesses).batches(16), count)
    return [learned(example) for batch in batches for example in batch]


def test_without_guesses_every_example_calls_the_tool_and_answers():
    texts = some(0.0)
    assert all("<tool_call>" in text for text in texts)
    assert all(re.search(r"\\boxed\{-?\d+\}<\|im_end\|>$", text) for text in texts)


def test_a_guess_answers_at_once():
    assert all(re.fullmatch(r"\\boxed\{-?\d+\}<\|im_end\|>", text) for text in some(1.0))


def test_batches_mix_both():
    for batch in islice(Examples(TUNED, 4, guesses=0.5).batches(32), 4):
        calls = sum("<tool_call>" in learned(example) for example in batch)
        assert calls == pytest.approx(16, abs=12)
