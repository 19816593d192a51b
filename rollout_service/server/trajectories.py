"""Trajectories for looking at: their outline, and ranges of their tokens with text.

Threads decode records and make texts; paging decodes a record once. Deleted content is shown for `KEPT_SECONDS` at
most.
"""

from __future__ import annotations

import codecs
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import anyio
import anyio.to_thread

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.sessions import MaskReason
from api_schemas.rollouts.tokens import SegmentOutline, TokenRange, TrajectoryOutline, TurnRange
from api_schemas.rollouts.trees import AgentNode, RolloutNodes
from api_schemas.trajectories import Segment, Trajectory
from rollout_service.base.errors import InvalidFieldError, NotFoundError
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.store.contract import Store
from rollout_service.tokens.tokenizer import TokenBytes

MAX_RANGE = 20_000
"""The most tokens of one answer."""
KEPT_SECONDS = 15.0
MAX_KEPT_TOKENS = 2_000_000
"""The most tokens that are kept; the last trajectory is kept whatever its size."""
NO_TRAJECTORY_HINT = (
    "Wait until the rollout has ended. One that failed before its first turn has no trajectory, and tokens are deleted "
    "as the settings of retention say."
)


@dataclass(frozen=True, slots=True)
class _Viewed:
    trajectory: Trajectory
    pool: str
    masked: dict[int, MaskReason | None]
    tokens: int
    read_at: float


class TrajectoryViewer:
    def __init__(self, store: Store, serving: PolicyServing) -> None:
        self._store = store
        self._serving = serving
        self._kept: OrderedDict[tuple[str, int | None], _Viewed] = OrderedDict()
        self._lock = anyio.Lock()

    async def outline(self, rollout_id: str, node: int | None = None) -> TrajectoryOutline:
        """Return the segments of a trajectory without their tokens; `node` is a sub-agent's number.

        Raises:
            NotFoundError: There is no such rollout or sub-agent, or it has no trajectory.
        """
        viewed = await self._view(rollout_id, node)
        table = await self._table(viewed.pool)
        make = partial(outline, viewed.trajectory, rollout_id, node, has_text=table is not None, masked=viewed.masked)
        return await anyio.to_thread.run_sync(make)

    async def tokens(
        self, rollout_id: str, segment: int, start: int, count: int, node: int | None = None
    ) -> TokenRange:
        """Return a range of a segment's tokens.

        Raises:
            NotFoundError: There is no such rollout or sub-agent, or it has no trajectory.
            InvalidFieldError: The trajectory has no such segment.
        """
        viewed = await self._view(rollout_id, node)
        segments = all_segments(viewed.trajectory)
        if segment >= len(segments):
            raise InvalidFieldError.at(
                "query.segment",
                f"the trajectory has {len(segments)} segments",
                hint=f"List them with GET /v1/rollouts/{rollout_id}/outline.",
            )
        table = await self._table(viewed.pool)
        return await anyio.to_thread.run_sync(token_range, segments[segment], segment, start, count, table)

    async def whole(
        self, trajectory: Trajectory, rollout: Rollout, pool: str, node: int | None = None
    ) -> tuple[TrajectoryOutline, list[TokenRange]]:
        table = await self._table(pool)

        def show() -> tuple[TrajectoryOutline, list[TokenRange]]:
            shown = outline(trajectory, rollout.rollout_id, node, has_text=table is not None, masked=_masked(rollout))
            segments = enumerate(all_segments(trajectory))
            return shown, [token_range(segment, index, 0, len(segment.token_ids), table) for index, segment in segments]

        return await anyio.to_thread.run_sync(show)

    async def _table(self, pool: str) -> TokenBytes | None:
        """Return the bytes of a pool's tokens, which a thread reads the first time."""
        renderer = self._serving.renderer(pool)
        if renderer is None:
            return None
        async with self._lock:
            return await anyio.to_thread.run_sync(lambda: renderer.token_bytes)

    async def _view(self, rollout_id: str, node: int | None) -> _Viewed:
        key = (rollout_id, node)
        async with self._lock:
            self._forget_old()
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
            viewed = self._kept[key] = await self._read(rollout_id, node)
            while len(self._kept) > 1 and sum(one.tokens for one in self._kept.values()) > MAX_KEPT_TOKENS:
                self._kept.popitem(last=False)
            return viewed

    def _forget_old(self) -> None:
        since = time.monotonic() - KEPT_SECONDS
        for key in [key for key, one in self._kept.items() if one.read_at < since]:
            del self._kept[key]

    async def _read(self, rollout_id: str, node: int | None) -> _Viewed:
        rollout = await self._store.get(rollout_id)
        if rollout is None:
            raise NotFoundError(
                f"there is no rollout {rollout_id}", hint="List the known rollouts with GET /v1/rollouts."
            )
        if node is None:
            trajectory, pool = await self._store.trajectory(rollout_id), rollout.pool
        else:
            tree = await self._store.tree(rollout_id, trajectories=True)
            found = find_node(tree or RolloutNodes(rollout_id=rollout_id, nodes=[]), node)
            trajectory, pool = found.trajectory, found.pool
        if trajectory is None:
            raise NotFoundError(
                f"rollout {rollout_id} has no trajectory; its state is {rollout.state}",
                hint=NO_TRAJECTORY_HINT,
            )
        tokens = sum(len(segment.token_ids) for segment in all_segments(trajectory))
        return _Viewed(trajectory, pool, _masked(rollout), tokens, time.monotonic())


def find_node(tree: RolloutNodes, number: int) -> AgentNode:
    """Return the sub-agent with this number.

    Raises:
        NotFoundError: There is none.
    """
    node_id = f"{tree.rollout_id}/{number}"
    for node in tree.nodes:
        if node.node_id == node_id:
            return node
    raise NotFoundError(
        f"rollout {tree.rollout_id} has no sub-agent {number}; it has {len(tree.nodes)}",
        hint=f"List them with GET /v1/rollouts/{tree.rollout_id}/nodes.",
    )


def _masked(rollout: Rollout) -> dict[int, MaskReason | None]:
    return {mark.turn: mark.masked_because for mark in rollout.turn_marks}


DIGITS = 4


def all_segments(trajectory: Trajectory) -> list[Segment]:
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
    """Return a range of tokens; fewer than `count` where the segment ends."""
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
    """Return the first token that differs from the parent's; the end of the shorter if none does."""
    if segment.parent is None:
        return None
    mine, others = segment.token_ids, segments[segment.parent].token_ids
    pairs = zip(mine, others, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(mine), len(others)))


def _runs(values: Iterable[int]) -> list[tuple[int, int]]:
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def _entropy(logprobs: Sequence[float]) -> float | None:
    """Return the entropy of the likeliest tokens, with all others as one; None where nothing was sampled."""
    if not logprobs:
        return None
    shares = [math.exp(value) for value in logprobs]
    rest = max(0.0, 1.0 - sum(shares))
    total = -sum(share * value for share, value in zip(shares, logprobs, strict=True) if share)
    return round(total - (rest * math.log(rest) if rest else 0.0), DIGITS)


@dataclass(slots=True)
class TokenText:
    """A text with the ends of its tokens, in UTF-16 code units.

    Every token's bytes can be recovered, from `pieces` or from its text, even where a character is cut.
    """

    text: str = ""
    ends: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    """The positions of tokens that are not whole characters."""
    pieces: dict[int, str] = field(default_factory=dict)
    """The bytes of each of them, in hexadecimal."""


def join(tokens: Sequence[bytes]) -> TokenText:
    result = TokenText()
    parts: list[str] = []
    length, pending, partial = 0, b"", set[int]()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for position, token in enumerate(tokens):
        held, text = pending, decoder.decode(token)
        pending, _ = decoder.getstate()  # a begun character
        if held or pending or "\ufffd" in text:
            partial.add(position)
        parts.append(text)
        length += _units(text)
        result.ends.append(length)
    if pending:  # the range ends within a character
        parts.append("\ufffd")
        result.ends[-1] += 1
    result.text = "".join(parts)
    result.partial = sorted(partial)
    result.pieces = {position: tokens[position].hex() for position in result.partial}
    return result


def _units(text: str) -> int:
    if text.isascii() or max(text) <= "\uffff":
        return len(text)
    return len(text.encode("utf-16-le")) // 2
