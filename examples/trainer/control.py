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
from rollout_service.groups.statistics import group_normalized, leave_one_out


def shuffled(arrays: BatchArrays, seed: int, kind: Advantages = Advantages.GROUP_NORM) -> BatchArrays:
    """Return the batch with the rewards of its usable samples exchanged, across groups, and advantages of this kind."""
    tensors = arrays.tensors
    scored = np.flatnonzero((tensors["usable"] == 1) & ~np.isnan(tensors["rewards"]))
    rewards = np.full_like(tensors["rewards"], np.nan)
    random = np.random.default_rng([seed, arrays.batch.number])
    rewards[scored] = tensors["rewards"][random.permutation(scored)]
    starts = tensors["group_offsets"]
    groups = [rewards[begin:end] for begin, end in pairwise(starts)]
    advantages = np.concatenate([_relative(group, kind) for group in groups])
    return BatchArrays(arrays.batch, {**tensors, "rewards": rewards, "advantages": advantages})


def _relative(rewards: NDArray[np.float32], kind: Advantages) -> NDArray[np.float32]:
    compute = group_normalized if kind is Advantages.GROUP_NORM else leave_one_out
    found = compute([None if np.isnan(reward) else float(reward) for reward in rewards])
    return np.array([np.nan if one is None else one for one in found], rewards.dtype)
