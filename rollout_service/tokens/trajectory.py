"""Growing segments with their extras, the check of finished trajectories, and the choice of turns to train on.

A segment's five lists always have equal lengths; the mask is 1 exactly on sampled tokens.
"""

from __future__ import annotations

import base64
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from api_schemas.trajectories import ForkReason, RoutedExperts, Segment, SegmentRole, Trajectory
from rollout_service.tokens.errors import InvariantError, RecordError

T = TypeVar("T")

_Name = Literal["uint8", "uint16", "int32"]
_DTYPES: tuple[tuple[_Name, str], ...] = (("uint8", "u1"), ("uint16", "<u2"), ("int32", "<i4"))


class TurnExtras(Protocol):
    """As in `engines.contract.ReturnedExtras`; None for those that were not requested."""

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]] | None:
        """For each sampled token."""

    @property
    def prompt_logprobs(self) -> Sequence[float | None] | None:
        """For the prompt's tokens that are new to the segment."""

    @property
    def routed_experts(self) -> NDArray[np.int32] | None:
        """`[tokens, layers, experts per token]`, for the tokens for which the segment had no experts before."""


@dataclass(slots=True)
class GrowingExtras:
    """The extras of a segment, kept in step with its tokens as it grows.

    Every list has one entry per token of the segment, up to the last turn with extras; experts have one row per token,
    except for the last token of the segment's last turn. A turn may have none, such as an answer that was cut off. If
    any extras of a turn do not fit it, none are added.
    """

    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    _experts: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def routed(self) -> int:
        return sum(len(part) for part in self._experts)

    def add_turn(self, turn: TurnExtras, *, before: int, prompt: int, sampled: int) -> None:
        """The segment had `before` tokens, and the prompt has `prompt`."""
        self._check(turn, before=before, prompt=prompt, sampled=sampled)
        if turn.top_logprobs is not None:
            ids, values = _with_empty(self.top_ids, prompt), _with_empty(self.top_logprobs, prompt)
            self.top_ids = ids + [[token for token, _ in row] for row in turn.top_logprobs]
            self.top_logprobs = values + [[value for _, value in row] for row in turn.top_logprobs]
        if turn.prompt_logprobs is not None:
            known = _with_unknown(self.prompt_logprobs, before)
            self.prompt_logprobs = [*known, *turn.prompt_logprobs, *([None] * sampled)]
        if turn.routed_experts is not None:
            self._experts.append(turn.routed_experts)

    def add_context(self, turn: TurnExtras | None, *, before: int, end: int) -> None:
        """Add the extras of the tokens that a turn read and sampled, in a segment where they are context.

        The segment had `before` tokens and has `end` with them. Log-probabilities of tokens that were sampled are
        unknown here: those of the engine are not at temperature 1.
        """
        if turn is None:
            return
        if turn.top_logprobs is not None:
            self.top_ids = _with_empty(self.top_ids, end)
            self.top_logprobs = _with_empty(self.top_logprobs, end)
        if turn.prompt_logprobs is not None:
            known = _with_unknown(self.prompt_logprobs, before)
            self.prompt_logprobs = _with_unknown([*known, *turn.prompt_logprobs], end)
        if turn.routed_experts is not None:
            self._experts.append(turn.routed_experts)

    def routed_experts(self) -> RoutedExperts | None:
        """Use the narrowest type that holds all experts so far."""
        if not self._experts:
            return None
        values = np.concatenate(self._experts)
        largest = int(values.max(initial=0))
        name, code = next(each for each in _DTYPES if largest <= np.iinfo(each[1]).max)
        data = base64.b64encode(values.astype(code).tobytes()).decode()
        return RoutedExperts.model_construct(shape=list(values.shape), dtype=name, data=data)

    def _check(self, turn: TurnExtras, *, before: int, prompt: int, sampled: int) -> None:
        lengths = (
            ("top_logprobs", turn.top_logprobs, sampled),
            ("prompt_logprobs", turn.prompt_logprobs, prompt - before),
            ("routed_experts", turn.routed_experts, prompt + sampled - 1 - self.routed),
        )
        for name, values, expected in lengths:
            if values is not None and len(values) != expected:
                raise RecordError(
                    f"{name} came for {len(values)} tokens, but {expected} were expected",
                    hint="Ask the engine for them from the first token that the segment lacks.",
                )


def _with_empty(rows: list[list[T]] | None, length: int) -> list[list[T]]:
    known = rows or []
    return known + [[] for _ in range(length - len(known))]


def _with_unknown(values: list[float | None] | None, length: int) -> list[float | None]:
    known = values or []
    return known + [None] * (length - len(known))


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
        """Add tokens that the policy did not sample here."""
        count = len(ids)
        self._add(ids, 0, array("d", [0.0]) * count, array("q", [-1]) * count, -1)

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn_id: int) -> None:
        self._add(ids, 1, logprobs, versions, turn_id)

    def _add(
        self,
        ids: Sequence[int],
        mask: int,
        logprobs: Sequence[float],
        versions: Sequence[int],
        turn_id: int,
    ) -> None:
        # An array takes another as a block of memory, and other sequences number by number.
        self.token_ids.extend(ids)
        self.loss_mask.extend(array("b", [mask]) * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.turn_ids.extend(array("i", [turn_id]) * len(ids))

    def freeze(self) -> Segment:
        length, extras = len(self.token_ids), self.extras
        has_top, has_prompt = extras.top_ids is not None, extras.prompt_logprobs is not None
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
            top_ids=_with_empty(extras.top_ids, length) if has_top else None,
            top_logprobs=_with_empty(extras.top_logprobs, length) if has_top else None,
            prompt_logprobs=_with_unknown(extras.prompt_logprobs, length) if has_prompt else None,
            # Until a turn reads on, those of an answer that was cut off are not known.
            routed_experts=extras.routed_experts() if extras.routed == length - 1 else None,
        )


def shared_length(before: Sequence[object], after: Sequence[object]) -> int:
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
        raise InvariantError("its shared prefix is longer than its parent agrees with", segment=number, index=shared)
    if any(segment.loss_mask[: segment.shared_prefix]):
        raise InvariantError("tokens that it shares with its parent are marked as sampled in both", segment=number)


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


_NOT_SAMPLED: dict[str, Any] = {
    "loss_mask": 0,
    "logprobs": 0.0,
    "versions": -1,
    "turn_ids": -1,
    "top_ids": [],
    "top_logprobs": [],
}
"""The values at a token that is not trained on."""


def train_on(trajectory: Trajectory, turns: Collection[int]) -> Trajectory:
    """Return a trajectory that is trained on these turns alone.

    Mask 1 stays on the tokens of the chosen turns and is on no other; their prompts stay, id for id; turns keep their
    ids. Segments without a chosen turn are left out, as is the rest of a segment after its last chosen turn.

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
    chosen = [turn in turns and bool(mask) for turn, mask in zip(segment.turn_ids, segment.loss_mask, strict=True)]
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


def _linked(segments: Sequence[Segment], number: int, kept: dict[int, Segment], places: dict[int, int]) -> Segment:
    """Make the nearest kept segment before it the parent."""
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
