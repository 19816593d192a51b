"""Samples one token for each sequence of a batch, with SGLang's definitions.

- A token's logprob comes from the temperature-scaled softmax; top_k, top_p and min_p restrict the tokens that can be
  drawn, but do not renormalize the distribution. Greedy requests report logprobs at temperature 1.
- The random number of a draw is a function of the request's seed and the token's position: a sample depends neither on
  the rest of the batch nor on interruptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_service.engines.kinds.embedded.weights import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def is_restricted(self) -> bool:
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


def sample(
    logits: Array, settings: Sequence[SamplerSettings], positions: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw one token per row.

    `logits` are `[rows, vocab_size]`, and `positions` are absolute positions of the new tokens.

    Returns:
        Token ids and their logprobs, `[rows]` each.
    """
    logprobs = log_softmax(logits, settings)
    weights = np.exp(logprobs)
    for row, each in enumerate(settings):
        if each.is_restricted:
            weights[row] = _restrict(weights[row], each)
    uniforms = _uniforms([each.seed for each in settings], positions)
    sums = np.cumsum(weights, axis=-1)
    # Take the smallest id whose cumulative weight exceeds u * total. The comparison is strict, so ids of weight 0 are
    # never drawn.
    tokens = (sums <= (uniforms * sums[:, -1])[:, None]).sum(axis=-1)
    greedy = np.fromiter((each.is_greedy for each in settings), bool, len(settings))
    if greedy.any():
        tokens[greedy] = logits[greedy].argmax(axis=-1)
    return tokens, logprobs[np.arange(len(tokens)), tokens]


def log_softmax(logits: Array, settings: Sequence[SamplerSettings]) -> NDArray[np.float64]:
    """Return the logprobs of every token in each row, as they are reported."""
    temperatures = np.array([1.0 if each.is_greedy else each.temperature for each in settings])
    scaled = logits.astype(np.float64) / temperatures[:, None]
    scaled -= scaled.max(axis=-1, keepdims=True)
    return np.asarray(scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True)))


def _restrict(weights: NDArray[np.float64], settings: SamplerSettings) -> NDArray[np.float64]:
    """In a copy, set the weights that top_k, top_p and min_p exclude to 0; the likeliest token always stays."""
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order]
    keep = ranked >= settings.min_p * ranked[0]
    if settings.top_k > 0:
        keep[settings.top_k :] = False
    if settings.top_p < 1.0:
        keep &= np.cumsum(ranked) - ranked <= settings.top_p
    restricted = np.zeros_like(weights)
    restricted[order[keep]] = ranked[keep]
    return restricted


def _uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from seeds and positions: two rounds of SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        mixed = _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) + _GOLDEN)
        mixed = _mix(mixed + np.asarray(positions, np.uint64) * _GOLDEN)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))
