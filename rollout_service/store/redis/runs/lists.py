"""The groups of a run as rows, and its history, from Redis.

A page goes through the states of groups by their numbers, which have no gaps, in calls that take Redis a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api_schemas.views.summaries import SummaryOrder
from rollout_service.store.base import BaseRuns, RunSignals
from rollout_service.store.codec.groups import StoredGroup, StoredGroups
from rollout_service.store.codec.runs import SIZE
from rollout_service.store.lists_contract import LOOKED_AT, GroupSelection
from rollout_service.store.redis.runs.database import RunDatabase
from rollout_service.store.redis.runs.records import ClosedRecord, Command, GroupStatus, OpenRecord
from rollout_service.store.redis.runs.transaction import chunks

STATES_AT_ONCE = 2_000
"""The most states of groups that one read returns."""
MEMBERS_AT_ONCE = 1_000
"""The most rollouts that one read looks at."""
RECORDS_AT_ONCE = 10_000
"""The most records of a history that one read returns, 0.8 MB."""
_FIELDS = ("s", "w", "k", "N", "e")
"""The fields of a rollout's hash that a row of a group has, as `rollouts.lua` names them."""


class RunPages(BaseRuns):
    """The lists of the runs of one store."""

    def __init__(self, database: RunDatabase, signals: RunSignals) -> None:
        super().__init__(signals)
        self._database = database

    async def _groups(
        self, run_id: str, which: GroupSelection, order: SummaryOrder, after: int | None, limit: int
    ) -> StoredGroups:
        run, _, _ = await self._database.look(run_id)
        count = run.record.cursor
        if order == "newest":
            numbers = range(min(count, count if after is None else after) - 1, -1, -1)
        else:
            numbers = range(0 if after is None else after + 1, count)
        found, last = await self._matching(run_id, which, numbers, limit)
        rows = await self._stored(run_id, found)
        members = await self._rows([name for group in rows for name in group.members])
        return StoredGroups(rows, members, last)

    async def _matching(
        self, run_id: str, which: GroupSelection, numbers: Sequence[int], limit: int
    ) -> tuple[dict[int, GroupStatus], int | None]:
        """Return up to `limit` groups that match, and the number after which to go on, None if none is left."""
        keys, found, last = self._database.keys(run_id), dict[int, GroupStatus](), None
        for some in chunks(numbers[:LOOKED_AT], STATES_AT_ONCE):
            _, (states,) = await self._database.read([("HMGET", keys.states, *some)])
            for number, text in zip(some, states, strict=True):
                status = None if text is None else GroupStatus.parse(text.decode())
                if status is not None and _is_wanted(status, which):
                    if len(found) == limit:
                        return found, last
                    found[number] = status
                last = number
        return found, last if len(numbers) > LOOKED_AT else None

    async def _stored(self, run_id: str, found: Mapping[int, GroupStatus]) -> list[StoredGroup]:
        if not found:
            return []
        keys, numbers = self._database.keys(run_id), list(found)
        records: list[Command] = [
            ("GETRANGE", keys.history, number * SIZE, number * SIZE + SIZE - 1) for number in numbers
        ]
        _, (started, closed, *history) = await self._database.read(
            [("HMGET", keys.open, *numbers), ("HMGET", keys.closed, *numbers), *records]
        )
        parts = zip(found.items(), started, closed, history, strict=True)
        return [_stored_group(number, status, *stored) for (number, status), *stored in parts]

    async def _rows(self, rollout_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the rollouts that exist, by id."""
        root, found = self._database.root, {}
        for some in chunks(rollout_ids, MEMBERS_AT_ONCE):
            reads: list[Command] = [("HMGET", f"{root}:r:{name}", *_FIELDS) for name in some]
            _, replies = await self._database.read(reads)
            for name, (state, reward, code, tokens, environment) in zip(some, replies, strict=True):
                if state is not None:
                    found[name] = {
                        "state": state.decode(),
                        "reward": None if reward is None else float(reward),
                        "code": None if code is None else code.decode(),
                        "tokens": None if tokens is None else int(tokens),
                        "environment": environment.decode(),
                    }
        return found

    async def _history(self, run_id: str) -> tuple[Sequence[bytes], Mapping[str, int]]:
        run, _, _ = await self._database.look(run_id)
        key, parts = self._database.keys(run_id).history, []
        for first in range(0, run.record.cursor, RECORDS_AT_ONCE):
            last = (first + RECORDS_AT_ONCE) * SIZE - 1
            _, (data,) = await self._database.read([("GETRANGE", key, first * SIZE, last)])
            parts.append(data)
        return parts, run.record.counters


def _is_wanted(status: GroupStatus, which: GroupSelection) -> bool:
    return which.state in (None, status.state) and which.reason in (None, status.reason)


def _stored_group(
    number: int, status: GroupStatus, started: bytes | None, closed: bytes | None, record: bytes
) -> StoredGroup:
    opened = None if started is None else OpenRecord.decode(started)
    ended = None if closed is None else ClosedRecord.decode(closed)
    group = opened or ended
    return StoredGroup(
        number=number,
        state=status.state,
        reason=status.reason,
        batch=status.batch,
        members=[] if group is None else group.members,
        summary=None if ended is None else ended.summary,
        record=record,
    )
