"""A trajectory that is trained on some of its turns alone.

Guarantees: mask 1 stays on the tokens of the chosen turns and is on no other; their prompts stay, id for id; turns keep
their ids. Segments without a chosen turn are left out, as is the rest of a segment after its last chosen turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from api_schemas.trajectories import ForkReason, Segment, Trajectory
from rollout_service.tokens.errors import InvariantError

_NOT_SAMPLED: dict[str, Any] = {
    "loss_mask": 0,
    "logprobs": 0.0,
    "versions": -1,
    "turn_ids": -1,
    "top_ids": [],
    "top_logprobs": [],
}
"""The value of each list at a token that is not trained on."""


def train_on(trajectory: Trajectory, turns: Collection[int]) -> Trajectory:
    """Return a trajectory that is trained on these turns alone.

    Raises:
        InvariantError: A turn is in none of its segments.
    """
    segments = [*trajectory.segments, *trajectory.untrained]
    kept = {
        number: _selected(segment, turns)
        for number, segment in enumerate(segments)
        if not set(turns).isdisjoint(segment.turn_ids)
    }
    missing = set(turns).difference(*(segment.turn_ids for segment in kept.values()))
    if missing:
        raise InvariantError(f"turn {min(missing)} is in no segment", segment=len(segments))
    places = {number: place for place, number in enumerate(kept)}
    chosen = [_linked(segments, number, kept, places) for number in kept]
    return trajectory.model_copy(
        update={
            "segments": chosen,
            "untrained": [],
            "fork_counts": dict(Counter(segment.fork_reason for segment in chosen)),
        }
    )


def _selected(segment: Segment, turns: Collection[int]) -> Segment:
    chosen = [
        turn in turns and bool(mask) for turn, mask in zip(segment.turn_ids, segment.loss_mask, strict=True)
    ]
    end = len(chosen)
    if segment.routed_experts is None:  # its array has a row for each token
        end -= chosen[::-1].index(True)
    update: dict[str, Any] = {"token_ids": segment.token_ids[:end]}
    for name, otherwise in _NOT_SAMPLED.items():
        if (values := getattr(segment, name)) is not None:
            pairs = zip(values[:end], chosen, strict=False)
            update[name] = [value if is_chosen else otherwise for value, is_chosen in pairs]
    if segment.prompt_logprobs is not None:
        update["prompt_logprobs"] = segment.prompt_logprobs[:end]
    return segment.model_copy(update=update)


def _linked(
    segments: Sequence[Segment], number: int, kept: dict[int, Segment], places: dict[int, int]
) -> Segment:
    """Return a segment with the nearest kept one before it as its parent."""
    segment, shared = kept[number], segments[number].shared_prefix
    parent = segment.parent
    while parent is not None and parent not in kept:
        shared = min(shared, segments[parent].shared_prefix)
        parent = segments[parent].parent
    update: dict[str, Any] = {
        "parent": None if parent is None else places[parent],
        "shared_prefix": 0 if parent is None else min(shared, len(kept[parent].token_ids)),
    }
    if places[number] == 0:
        update["fork_reason"] = ForkReason.FIRST
    return segment.model_copy(update=update)
