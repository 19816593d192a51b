"""A control for a training run: the same batches, with rewards that say nothing.

Guarantees: the rewards of a batch are those that it came with, each at a sample that chance chose among all of its
groups; advantages follow from them as the service computes them. The same seed and batch give the same result.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from api_schemas.runs import Advantages
from rollout_client.arrays import BatchArrays

_NO_SPREAD = 1e-6
"""A standard deviation that is only rounding, in numbers of 32 bits."""


def shuffled(arrays: BatchArrays, seed: int, kind: Advantages = Advantages.GROUP_NORM) -> BatchArrays:
    """Return the batch with the rewards of its usable samples exchanged, across groups, and advantages of this kind."""
    tensors = arrays.tensors
    scored = np.flatnonzero((tensors["usable"] == 1) & ~np.isnan(tensors["rewards"]))
    rewards = np.full_like(tensors["rewards"], np.nan)
    random = np.random.default_rng([seed, arrays.batch.number])
    rewards[scored] = tensors["rewards"][random.permutation(scored)]
    starts = tensors["group_offsets"]
    groups = [rewards[begin:end] for begin, end in pairwise(starts)]
    relative = _normalized if kind is Advantages.GROUP_NORM else _left_out
    advantages = np.concatenate([relative(group) for group in groups])
    return BatchArrays(arrays.batch, {**tensors, "rewards": rewards, "advantages": advantages})


def _normalized(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the distance of each reward from the group's mean, in standard deviations; NaN where there is none."""
    scored = rewards[~np.isnan(rewards)]
    if len(scored) < 2:
        return np.full_like(rewards, np.nan)
    centered = rewards - scored.mean()
    return centered / scored.std() if scored.std() > _NO_SPREAD else 0.0 * centered


def _left_out(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the distance of each reward from the mean of the group's others; NaN where there is none."""
    scored = rewards[~np.isnan(rewards)]
    if len(scored) < 2:
        return np.full_like(rewards, np.nan)
    return (rewards - scored.mean()) * np.float32(len(scored) / (len(scored) - 1))
