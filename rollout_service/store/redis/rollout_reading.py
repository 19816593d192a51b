"""Reads of rollouts and events in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio.to_thread

from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutPage, RolloutState
from api_schemas.rollouts.trees import RolloutNodes
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder
from rollout_service.store.base import BaseStore
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.lists import find_summaries
from rollout_service.store.redis.replies import RolloutRow, decode_counts, decode_row
from rollout_service.store.redis.trajectories import TrajectoryPlace

ROWS_AT_ONCE = 256
"""The most rollouts, or records of them, that one call reads or writes."""


class RolloutReads(BaseStore):
    """The reading methods of the store; `place` keeps the trajectories."""

    def __init__(self, connection: RedisConnection, place: TrajectoryPlace) -> None:
        super().__init__(connection)
        self._connection = connection
        self._place = place

    async def get(self, rollout_id: str, *, whole_tree: bool = False) -> Rollout | None:
        rows = await self.rows([rollout_id])
        shown = codec.Shown.ALL if whole_tree else codec.Shown.REQUESTED
        return codec.decode_rollout(rows[0], shown) if rows else None

    async def _tokens(self, rollout_id: str) -> bytes | None:
        stored = await self._connection.command("GET", self._connection.key(f"t:{rollout_id}"))
        if stored is None:
            return None
        (data,) = await self._place.read({rollout_id: stored})
        return data

    async def tree(self, rollout_id: str, *, trajectories: bool = False) -> RolloutNodes | None:
        rows = await (self.whole_rows([rollout_id]) if trajectories else self.rows([rollout_id]))
        return await anyio.to_thread.run_sync(codec.decode_tree, rows[0]) if rows else None

    async def _summaries(
        self, which: SummaryFilter, order: SummaryOrder, after: int | None, limit: int
    ) -> tuple[Sequence[RolloutSummary], int | None]:
        return await find_summaries(self._connection, which, order=order, after=after, limit=limit)

    async def counts(self) -> dict[RolloutState, int]:
        return decode_counts(await self._connection.read("rollouts_counts"))

    async def held(self, owner: str, *, believed: Mapping[str, int] | None = None) -> Mapping[str, int]:  # noqa: ARG002 - it knows better
        found = iter(await self._connection.read("rollouts_held", owner))
        return {rollout_id.decode(): int(token) for rollout_id, token in zip(found, found, strict=True)}

    async def saved_turns(self, rollout_id: str) -> list[bytes]:
        key = self._connection.key(f"u:{rollout_id}")
        turns: list[bytes] = await self._connection.command("LRANGE", key, 0, -1)
        return turns

    async def saved_steps(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for start in range(0, len(rollout_ids), ROWS_AT_ONCE):
            some = rollout_ids[start : start + ROWS_AT_ONCE]
            answer = await self._connection.read("rollouts_saved_steps", *some)
            found |= {name: records for name, records in zip(some, answer, strict=True) if records}
        return found

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        key = self._connection.key("events")
        entries = await self._connection.command("XRANGE", key, f"({after}-0", "+", "COUNT", limit)
        return [codec.decode_event(event_row(entry)) for entry in entries]

    async def last_event(self) -> int:
        key = self._connection.key("events")
        found = await self._connection.command("XREVRANGE", key, "+", "-", "COUNT", 1)
        return event_row(found[0])["event_id"] if found else 0

    async def _page(self, state: RolloutState | None, after: int, limit: int) -> RolloutPage:
        found, counts = await self._connection.read("rollouts_page", state or "", str(after), limit + 1)
        return codec.make_page([decode_row(row) for row in found], limit, decode_counts(counts))

    async def rows(self, rollout_ids: Sequence[str], *, trajectories: bool = False) -> Sequence[RolloutRow]:
        """Return the rows of the rollouts that exist, in this order, with Redis's records of their trajectories."""
        found: list[RolloutRow] = []
        for start in range(0, len(rollout_ids), ROWS_AT_ONCE):
            some = rollout_ids[start : start + ROWS_AT_ONCE]
            answer = await self._connection.read("rollouts_rows", int(trajectories), *some)
            found += [decode_row(row) for row in answer if row is not None]
        return found

    async def whole_rows(self, rollout_ids: Sequence[str]) -> Sequence[RolloutRow]:
        """Return the rows of the rollouts that exist, in this order, with their encoded trajectories.

        Raises:
            RecordLostError: A trajectory is damaged, or gone without having been pruned.
        """
        rows = await self.rows(rollout_ids, trajectories=True)
        stored = {row["rollout_id"]: row["trajectory"] for row in rows if row["trajectory"] is not None}
        found = dict(zip(stored, await self._place.read(stored), strict=True))
        return [row.with_trajectory(found.get(row["rollout_id"])) for row in rows]


def event_row(entry: Any) -> dict[str, Any]:
    """Return the event of an entry of the stream, as redis-py reads it."""
    name, fields = entry
    return {
        "event_id": int(name.split(b"-")[0]),
        "time": float(fields[b"t"]),
        "kind": fields[b"k"].decode(),
        "subject": fields[b"s"].decode(),
        "data": fields[b"d"],
    }
