"""What scripted engines say beside the tokens: made up, but a function of the absolute position alone.

So tests know every figure of any generation, wherever and however often it was interrupted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SAMPLED_LOGPROB = -0.5
_EXPERTS = 64


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request, whatever protocol it came by."""

    rid: str
    ids: list[int]
    budget: int
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    """The first prompt token that the answer's list is to begin with."""
    routed_experts_from: int | None = None


def likeliest(token: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The likeliest ids with logprobs where `token` is sampled, best first: itself, and the ids that follow it."""
    return [((token + rank) % vocab_size, SAMPLED_LOGPROB - rank) for rank in range(min(count, vocab_size))]


def prompt_logprob(position: int) -> float:
    """The logprob of the prompt token at a position after the first."""
    return -1.0 - position / 1024


def experts(first: int, tokens: int, shape: tuple[int, int]) -> Iterator[list[list[int]]]:
    """The experts that read each of so many tokens from `first` on, `[layers, experts per token]` each."""
    layers, width = shape
    for position in range(first, first + max(tokens, 0)):
        yield [[(position + 3 * layer + slot) % _EXPERTS for slot in range(width)] for layer in range(layers)]
