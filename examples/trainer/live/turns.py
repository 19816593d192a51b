"""The judged turns of a batch of live sessions.

Guarantee: every sampled token of a usable turn is in exactly one `Turn`, and no other token is in any.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from api_schemas.rollouts.sessions import TurnMark
from rollout_client.arrays import BatchArrays


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled in one turn, where it is in its segment, and what became of it."""

    mark: TurnMark
    user: str
    """A salted hash: whose session it is."""
    segment: int
    """The number of its segment in the batch."""
    tokens: NDArray[np.int64]
    """The places of its sampled tokens in the segment."""
    token_ids: NDArray[np.int32]


def turns_of(arrays: BatchArrays) -> list[Turn]:
    """Return the usable turns of a batch, in order."""
    samples = [sample for group in arrays.batch.groups for sample in group.samples]
    found = []
    for number, sample in enumerate(samples):
        rollout = sample.rollout
        if not sample.usable or rollout.session is None:
            continue
        marks = {mark.turn: mark for mark in rollout.turn_marks if mark.usable}
        for segment in range(*arrays.tensors["sample_offsets"][number : number + 2]):
            columns = arrays.segment(segment)
            turn_ids = np.where(columns["loss_mask"] == 1, columns["turn_ids"], -1)
            for turn in np.unique(turn_ids[turn_ids >= 0]):
                if (mark := marks.get(int(turn))) is None:
                    continue
                places = np.flatnonzero(turn_ids == turn)
                ids = columns["token_ids"][places]
                found.append(Turn(mark, rollout.session.user, segment, places, ids))
    return found


def shuffled_values(turns: Sequence[Turn], seed: int) -> list[Turn]:
    """Return the turns with their values exchanged by chance: a control, from which nothing can be learned."""
    values = [turn.mark.value for turn in turns]
    random.Random(seed).shuffle(values)
    return [
        replace(turn, mark=turn.mark.model_copy(update={"value": value}))
        for turn, value in zip(turns, values, strict=True)
    ]
