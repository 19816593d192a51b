"""The outline of a trajectory, and the columns of a range of its tokens. Pure functions, which may run in a thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from api_schemas.rollouts.sessions import MaskReason
from api_schemas.rollouts.tokens import SegmentOutline, TokenRange, TrajectoryOutline, TurnRange
from api_schemas.trajectories import Segment, Trajectory
from rollout_service.server.trajectories.token_text import TokenText, join
from rollout_service.tokens.token_bytes import TokenBytes

DIGITS = 4


def all_segments(trajectory: Trajectory) -> list[Segment]:
    """Return the segments as `Segment.parent` counts them."""
    return [*trajectory.segments, *trajectory.untrained]


def outline(
    trajectory: Trajectory,
    rollout_id: str,
    node: int | None,
    *,
    has_text: bool,
    masked: Mapping[int, MaskReason | None] | None = None,
) -> TrajectoryOutline:
    """Return a trajectory without its tokens; `masked` says why turns of a live session are not trained on."""
    segments = all_segments(trajectory)
    trained = len(trajectory.segments)
    return TrajectoryOutline(
        rollout_id=rollout_id,
        node=node,
        segments=[
            SegmentOutline(
                index=index,
                trained=index < trained,
                tokens=len(segment.token_ids),
                sampled=sum(segment.loss_mask),
                fork_reason=segment.fork_reason,
                parent=segment.parent,
                shared_prefix=segment.shared_prefix,
                role=segment.role,
                turns=_turns(segment, masked or {}),
                first_difference=_first_difference(segment, segments),
            )
            for index, segment in enumerate(segments)
        ],
        has_text=has_text,
        has_entropy=any(segment.top_logprobs is not None for segment in segments),
    )


def token_range(segment: Segment, index: int, start: int, count: int, table: TokenBytes | None) -> TokenRange:
    """Return a range of a segment's tokens; fewer than `count` where the segment ends."""
    cut = slice(start, start + count)
    ids, mask = segment.token_ids[cut], segment.loss_mask[cut]
    shown = TokenText() if table is None else join(table.of_ids(ids))
    top = segment.top_logprobs
    return TokenRange.model_construct(  # all of it is valid already
        segment=index,
        start=start,
        count=len(ids),
        total=len(segment.token_ids),
        ids=ids,
        text=None if table is None else shown.text,
        ends=shown.ends,
        partial=shown.partial,
        pieces=shown.pieces,
        mask=_runs(mask),
        versions=_runs(segment.versions[cut]),
        turns=_runs(segment.turn_ids[cut]),
        logprobs=[
            round(value, DIGITS) if sampled else None
            for value, sampled in zip(segment.logprobs[cut], mask, strict=True)
        ],
        entropy=None if top is None else [_entropy(values) for values in top[cut]],
    )


def _turns(segment: Segment, masked: Mapping[int, MaskReason | None]) -> list[TurnRange]:
    turns, start = [], 0
    for turn, tokens in groupby(segment.turn_ids):
        end = start + sum(1 for _ in tokens)
        if turn >= 0:
            turns.append(
                TurnRange(
                    turn=turn,
                    start=start,
                    end=end,
                    version=segment.versions[start],
                    masked_because=masked.get(turn),
                )
            )
        start = end
    return turns


def _first_difference(segment: Segment, segments: Sequence[Segment]) -> int | None:
    """Return the index of the first token that differs from the parent's; the end of the shorter if none does."""
    if segment.parent is None:
        return None
    mine, others = segment.token_ids, segments[segment.parent].token_ids
    pairs = zip(mine, others, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(len(mine), len(others))
    )


def _runs(values: Iterable[int]) -> list[tuple[int, int]]:
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def _entropy(logprobs: Sequence[float]) -> float | None:
    """Return the entropy of the likeliest tokens and the rest as one more; None where nothing was sampled."""
    if not logprobs:
        return None
    shares = [math.exp(value) for value in logprobs]
    rest = max(0.0, 1.0 - sum(shares))
    total = -sum(share * value for share, value in zip(shares, logprobs, strict=True) if share)
    return round(total - (rest * math.log(rest) if rest else 0.0), DIGITS)
