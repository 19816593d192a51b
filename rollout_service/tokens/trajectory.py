"""Growing segments, and the check of finished trajectories.

Guarantees: a segment's five lists always have equal lengths; the mask is 1 exactly on sampled tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

from api_schemas.trajectories import ForkReason, Segment, SegmentRole, Trajectory
from rollout_service.tokens.errors import InvariantError
from rollout_service.tokens.extras import GrowingExtras


@dataclass(slots=True)
class GrowingSegment:
    """A segment to which prompts and outputs are added in turn.

    Arrays take a fraction of a list's memory. Above all, the garbage collector skips them; in lists it would visit
    millions of tokens while every rollout waits.
    """

    fork_reason: ForkReason
    parent: int | None = None
    shared_prefix: int = 0
    role: SegmentRole = SegmentRole.MAIN
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: array[int] = field(default_factory=lambda: array("b"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    turn_ids: array[int] = field(default_factory=lambda: array("i"))
    extras: GrowingExtras = field(default_factory=GrowingExtras)

    def add_context(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy reads but did not sample here."""
        self._add(ids, 0, [0.0] * len(ids), [-1] * len(ids), -1)

    def add_sampled(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn_id: int
    ) -> None:
        """Add the tokens of one turn."""
        self._add(ids, 1, logprobs, versions, turn_id)

    def _add(
        self,
        ids: Sequence[int],
        mask: int,
        logprobs: Sequence[float],
        versions: Sequence[int],
        turn_id: int,
    ) -> None:
        self.token_ids.extend(ids)
        self.loss_mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.turn_ids.extend([turn_id] * len(ids))

    def freeze(self) -> Segment:
        """Return a copy of the segment in its present state."""
        # Unchecked: the values were checked when they were recorded, and checking long lists again is slow.
        return Segment.model_construct(
            token_ids=self.token_ids.tolist(),
            loss_mask=self.loss_mask.tolist(),
            logprobs=self.logprobs.tolist(),
            versions=self.versions.tolist(),
            turn_ids=self.turn_ids.tolist(),
            fork_reason=self.fork_reason,
            parent=self.parent,
            shared_prefix=self.shared_prefix,
            role=self.role,
            top_ids=self.extras.top_ids,
            top_logprobs=self.extras.top_logprobs,
            prompt_logprobs=self.extras.prompt_logprobs,
            routed_experts=self.extras.routed_experts(),
        )


def shared_length(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists of ids."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(before), len(after)))


def check_invariants(trajectory: Trajectory) -> None:
    """Check the invariants of a trajectory.

    - All lists of a segment have equal lengths.
    - The mask is 1 exactly where there is a turn, with a version and a finite log-probability.
    - A turn's tokens are contiguous in one segment of either list, and a segment's turns are in order, so no token is
      trainable twice.
    - Exactly the first segment to train on has the fork reason `first`. A segment shares as long a prefix with its
      parent as it says, if it has one; its parent comes before it, and is one to train on if it is one itself.
    - The fork counts add up.

    Raises:
        InvariantError: An invariant is broken; the error names the segment and the token's index.
    """
    segments = [*trajectory.segments, *trajectory.untrained]
    seen: set[int] = set()
    for number, segment in enumerate(segments):
        is_first = number == 0 and bool(trajectory.segments)
        if (segment.fork_reason is ForkReason.FIRST) != is_first:
            raise InvariantError(f"its fork reason is {segment.fork_reason}", segment=number)
        _check_lengths(segment, number)
        _check_tokens(segment, number)
        _check_lineage(segments, number)
        _check_turns(segment, number, seen)
        if max(seen, default=-1) >= len(trajectory.finish_reasons):
            raise InvariantError(f"turn {max(seen)} has no finish reason", segment=number)
    if dict(Counter(s.fork_reason for s in segments)) != trajectory.fork_counts:
        raise InvariantError("the fork counts do not add up", segment=len(segments))


def _check_lengths(segment: Segment, number: int) -> None:
    for name in ("loss_mask", "logprobs", "versions", "turn_ids"):
        length = len(getattr(segment, name))
        if length != len(segment.token_ids):
            shortest = min(length, len(segment.token_ids))
            raise InvariantError(f"{name} and token_ids differ in length", segment=number, index=shortest)
    for name in ("top_ids", "top_logprobs", "prompt_logprobs"):
        if (values := getattr(segment, name)) is not None and len(values) != len(segment.token_ids):
            raise InvariantError(f"{name} and token_ids differ in length", segment=number)
    if segment.routed_experts is not None and segment.routed_experts.shape[0] != len(segment.token_ids) - 1:
        raise InvariantError("routed_experts does not have one row per token except the last", segment=number)


def _check_lineage(segments: Sequence[Segment], number: int) -> None:
    segment = segments[number]
    if segment.parent is None:
        if segment.shared_prefix:
            raise InvariantError("it has a shared prefix but no parent", segment=number)
        return
    if not 0 <= segment.parent < number:
        raise InvariantError(f"its parent is segment {segment.parent}", segment=number)
    shared = shared_length(segments[segment.parent].token_ids, segment.token_ids)
    if not 0 <= segment.shared_prefix <= shared:
        raise InvariantError(
            "its shared prefix is longer than its parent agrees with", segment=number, index=shared
        )
    if any(segment.loss_mask[: segment.shared_prefix]):
        raise InvariantError(
            "tokens that it shares with its parent are marked as sampled in both", segment=number
        )


def _check_tokens(segment: Segment, number: int) -> None:
    columns = zip(
        segment.token_ids,
        segment.loss_mask,
        segment.logprobs,
        segment.versions,
        segment.turn_ids,
        strict=True,
    )
    for index, (token, mask, logprob, version, turn) in enumerate(columns):
        if token < 0:
            raise InvariantError(f"token id {token} is negative", segment=number, index=index)
        if mask == 0:
            if logprob != 0.0 or version != -1 or turn != -1:
                raise InvariantError(
                    "a token that was not sampled has a turn, a version or a log-probability",
                    segment=number,
                    index=index,
                )
        elif mask != 1 or turn < 0 or version < 0 or not isfinite(logprob):
            raise InvariantError(
                "a sampled token lacks its turn, version or log-probability", segment=number, index=index
            )


def _check_turns(segment: Segment, number: int, seen: set[int]) -> None:
    """Check that turns begin in order and are not interrupted; add them to those of the segments before."""
    last_turn = -1
    for index, (before, turn) in enumerate(pairwise([-1, *segment.turn_ids])):
        if turn in (-1, before):
            continue
        if turn in seen:
            raise InvariantError(f"turn {turn} appears a second time", segment=number, index=index)
        if turn < last_turn:
            raise InvariantError(f"turn {turn} comes after turn {last_turn}", segment=number, index=index)
        last_turn = turn
        seen.add(turn)
