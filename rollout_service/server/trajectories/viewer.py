"""Reads trajectories for looking at.

Guarantees: the event loop is not held up, since records are decoded, and texts made, in threads. Paging through a long
trajectory decodes its record once, and not with every page. What was deleted is shown for `KEPT_SECONDS` at most.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread

from api_schemas.errors import FieldError
from api_schemas.rollouts import Rollout
from api_schemas.rollouts.sessions import MaskReason
from api_schemas.rollouts.tokens import TokenRange, TrajectoryOutline
from api_schemas.trajectories import Trajectory
from rollout_service.base.errors import InvalidFieldError, NotFoundError
from rollout_service.server.trajectories.columns import all_segments, outline, token_range
from rollout_service.store.contract import Store
from rollout_service.tokens import ChatRenderer
from rollout_service.tokens.token_bytes import TokenBytes

MAX_RANGE = 20_000
"""The most tokens of one answer."""
KEPT_SECONDS = 15.0
"""How long a decoded trajectory is kept after it was read."""
MAX_KEPT_TOKENS = 2_000_000
"""The most tokens of all trajectories that are kept; the one that was read last is kept whatever its size."""


class RendererSource(Protocol):
    """Knows the chat format of each pool; `PolicyServing` does."""

    def renderer(self, pool: str) -> ChatRenderer | None:
        """Return the chat format of a pool; None if it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class _Viewed:
    """A trajectory, and what else is needed to show it."""

    trajectory: Trajectory
    pool: str
    masked: dict[int, MaskReason | None]
    tokens: int
    read_at: float


class TrajectoryViewer:
    """Shows trajectories that are stored."""

    def __init__(self, store: Store, renderers: RendererSource) -> None:
        self._store = store
        self._renderers = renderers
        self._kept: OrderedDict[tuple[str, int | None], _Viewed] = OrderedDict()
        self._lock = anyio.Lock()

    async def outline(self, rollout_id: str, node: int | None = None) -> TrajectoryOutline:
        """Return the segments of a trajectory without their tokens; `node` is a sub-agent's number.

        Raises:
            NotFoundError: There is no such rollout or sub-agent, or it has no trajectory.
        """
        viewed = await self._view(rollout_id, node)
        table = await self._table(viewed.pool)
        make = partial(
            outline, viewed.trajectory, rollout_id, node, has_text=table is not None, masked=viewed.masked
        )
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
            raise InvalidFieldError(
                [FieldError(path="query.segment", message=f"the trajectory has {len(segments)} segments")],
                hint=f"List them with GET /v1/rollouts/{rollout_id}/outline.",
            )
        table = await self._table(viewed.pool)
        return await anyio.to_thread.run_sync(token_range, segments[segment], segment, start, count, table)

    async def whole(
        self, trajectory: Trajectory, rollout: Rollout, pool: str, node: int | None = None
    ) -> tuple[TrajectoryOutline, list[TokenRange]]:
        """Return all of a rollout's trajectory, or of its sub-agent's: the outline, and the tokens of each segment."""
        table = await self._table(pool)

        def show() -> tuple[TrajectoryOutline, list[TokenRange]]:
            shown = outline(
                trajectory, rollout.rollout_id, node, has_text=table is not None, masked=_masked(rollout)
            )
            segments = enumerate(all_segments(trajectory))
            return shown, [
                token_range(segment, index, 0, len(segment.token_ids), table) for index, segment in segments
            ]

        return await anyio.to_thread.run_sync(show)

    async def _table(self, pool: str) -> TokenBytes | None:
        """Return the bytes of the tokens of a pool; the first time, they are read in a thread."""
        renderer = self._renderers.renderer(pool)
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
            trajectory, pool = await self._read_node(rollout, node)
        if trajectory is None:
            raise NotFoundError(
                f"rollout {rollout_id} has no trajectory; its state is {rollout.state}",
                hint="Wait until the rollout has ended. One that failed before its first turn has no trajectory, and "
                "tokens are deleted as the settings of retention say.",
            )
        tokens = sum(len(segment.token_ids) for segment in all_segments(trajectory))
        return _Viewed(trajectory, pool, _masked(rollout), tokens, time.monotonic())

    async def _read_node(self, rollout: Rollout, number: int) -> tuple[Trajectory | None, str]:
        tree = await self._store.tree(rollout.rollout_id, trajectories=True)
        nodes = tree.nodes if tree is not None else []
        for node in nodes:
            if node.node_id == f"{rollout.rollout_id}/{number}":
                return node.trajectory, node.pool
        raise NotFoundError(
            f"rollout {rollout.rollout_id} has no sub-agent {number}; it has {len(nodes)}",
            hint=f"List them with GET /v1/rollouts/{rollout.rollout_id}/nodes.",
        )


def _masked(rollout: Rollout) -> dict[int, MaskReason | None]:
    return {mark.turn: mark.masked_because for mark in rollout.turn_marks}
