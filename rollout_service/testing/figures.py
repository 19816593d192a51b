"""The numbers that scripted engines return in addition to tokens.

They are made up, but each depends only on its token or its absolute position. So tests know every number of any
generation, wherever and however often it was interrupted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SAMPLED_LOGPROB = -0.5
_EXPERTS = 64


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request, in whatever protocol it came."""

    rid: str
    ids: list[int]
    budget: int
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    """The index of the prompt token that the answer's list begins with; None for no list."""
    routed_experts_from: int | None = None


def likeliest(token: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return the likeliest ids with their logprobs, best first: the sampled `token` and the ids that follow it."""
    return [((token + rank) % vocab_size, SAMPLED_LOGPROB - rank) for rank in range(min(count, vocab_size))]


def prompt_logprob(position: int) -> float:
    """Return the logprob of the prompt token at a position after the first."""
    return -1.0 - position / 1024


def experts(first: int, tokens: int, shape: tuple[int, int]) -> Iterator[list[list[int]]]:
    """Yield the experts that read each of `tokens` tokens from `first` on, as `[layers, experts per token]`."""
    layers, width = shape
    for position in range(first, first + max(tokens, 0)):
        yield [[(position + 3 * layer + slot) % _EXPERTS for slot in range(width)] for layer in range(layers)]
