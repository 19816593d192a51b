"""The store in one SQLite file on a local disk: the default, for one node.

Beyond the contract: only one process at a time can have the file open; concurrent writes share one flush to the disk;
trajectories are compressed; the newest 100,000 events and tombstones are kept.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from pydantic import JsonValue
from pydantic_core import to_json

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.nodes import NodeState
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span
from api_schemas.rollouts.trees import RolloutNodes
from api_schemas.views.summaries import RolloutSummary, SummaryFilter, SummaryOrder
from rollout_service.base.errors import StoreError
from rollout_service.base.signals import ChangeSignal, KeyedEvents, MonotonicCounter, ResettableEvent
from rollout_service.store.base import BaseStore
from rollout_service.store.cluster_contract import (
    ClusterStore,
    Heartbeat,
    NameTakenError,
    NodeRecord,
    NodeReport,
    RoleLease,
    live_node,
    unknown_node,
)
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec import summaries as summary_codec
from rollout_service.store.contract import Lease
from rollout_service.store.lists_contract import LOOKED_AT
from rollout_service.store.sqlite import rollout_statements as statements
from rollout_service.store.sqlite.lists import ROWS_AT_ONCE, SummarySearch, look
from rollout_service.store.sqlite.runs import SqliteRuns
from rollout_service.store.sqlite.schema import STORE, Disk
from rollout_service.store.sqlite.thread import DatabaseThread, newest_event, reads, writes

Record = Callable[[str, str, dict[str, JsonValue]], Awaitable[Event]]
"""Appends an event with its kind, subject and data."""


class SingleCluster(ClusterStore):
    """The only node of a store, in memory.

    It leads every role and is never declared dead. A drain lasts until it is undone or the process ends.
    """

    is_shared = False

    def __init__(self, record: Record) -> None:
        self._record = record
        self._node: NodeRecord | None = None
        self._changes = MonotonicCounter(1)
        self._roles: dict[str, RoleLease] = {}
        self._resigned = ChangeSignal()
        self._tokens = count(1)

    async def join(self, report: NodeReport, *, replacing: str | None = None) -> None:
        if self._node is not None and self._node.report.owner not in (report.owner, replacing):
            raise NameTakenError(self._node.report.name, self._node.report.owner)
        self._node = NodeRecord(report, NodeState.READY, 0.0)
        self._changes.increment()

    async def heartbeat(self, report: NodeReport) -> Heartbeat:
        if self._node is None or self._node.report.owner != report.owner:
            return Heartbeat(is_member=False)
        state = self._node.state
        self._node = NodeRecord(report, state, 0.0)
        if state is not NodeState.READY:
            return Heartbeat(is_member=True, state=state, states={state: 1})
        return Heartbeat(
            is_member=True,
            state=state,
            places=report.places,
            environments=dict.fromkeys(report.environments, 1),
            images=dict.fromkeys(report.images, 1),
            states={state: 1},
        )

    async def leave(self, owner: str) -> None:
        self._roles = {role: lease for role, lease in self._roles.items() if lease.owner != owner}
        self._resigned.notify()
        if self._node is not None and self._node.report.owner == owner:
            self._node = None
            self._changes.increment()

    async def nodes(self) -> Sequence[NodeRecord]:
        return [] if self._node is None else [self._node]

    async def change_state(self, name: str, state: NodeState) -> None:
        node = self._named(name)
        if node.state is state:
            return
        self._node = NodeRecord(node.report, state, node.silent_seconds)
        await self._record(f"node.{state}", name, {})
        self._changes.increment()

    async def remove(self, name: str) -> None:
        self._named(name)
        raise live_node(name)

    def _named(self, name: str) -> NodeRecord:
        if self._node is None or self._node.report.name != name:
            raise unknown_node(name)
        return self._node

    async def wait_for_change(self, after: int) -> int:
        return await self._changes.wait_above(after)

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        held = self._roles.get(role)
        if held is None:
            held = self._roles[role] = RoleLease(role, owner, next(self._tokens))
        return held if held.owner == owner else None

    async def resign(self, role: str, owner: str) -> None:
        if (held := self._roles.get(role)) is not None and held.owner == owner:
            del self._roles[role]
            self._resigned.notify()

    async def wait_for_role(self, role: str) -> None:
        while role in self._roles:
            await self._resigned.wait()

    async def leader(self, role: str) -> RoleLease | None:
        return self._roles.get(role)


_STAGES = (RolloutState.QUEUED, RolloutState.INIT, RolloutState.ROLLOUT, RolloutState.EVALUATE)


class SqliteStore(BaseStore):
    """The SQLite store: `async with await SqliteStore.open(path) as store:`.

    The path `:memory:` opens a store for tests that ends with its process.
    """

    segments = None
    rewinds = 0  # a file that went back in time is another start
    engines = None

    def __init__(self, path: Path | str, *, clock: Callable[[], float] = time.time, disk: Disk = "local") -> None:
        self._clock = clock
        self._work = ResettableEvent(is_set=True)
        self._cancels = ResettableEvent(is_set=True)
        self._newest_event = MonotonicCounter()
        self._results = KeyedEvents()
        self._due = math.inf
        self._thread = DatabaseThread(path, self._newest_event.advance, STORE.on_disk(disk))
        super().__init__(self._thread)
        self._runs = SqliteRuns(self._thread, clock, self._work.set)
        self._cluster = SingleCluster(self.record)

    @classmethod
    async def open(cls, path: Path | str, *, clock: Callable[[], float] = time.time, disk: Disk = "local") -> Self:
        """`clock` returns Unix seconds.

        Raises:
            StoreError: Another process has the file open, or the file is damaged, has another schema, or cannot be
                created.
        """
        store = cls(path, clock=clock, disk=disk)
        await store._thread.start()
        store._newest_event.advance(await store.last_event())
        return store

    @property
    def runs(self) -> SqliteRuns:
        return self._runs

    @property
    def cluster(self) -> SingleCluster:
        return self._cluster

    async def submit(self, request: RolloutRequest) -> tuple[Rollout, bool]:
        values = statements.submission(request, self._clock())
        rollout, new = await self._thread.write(statements.submit, values)
        if new:
            self._work.set()
        return rollout, new

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        pools: Collection[str] | None = None,
        waits: Mapping[str, float] | None = None,
    ) -> list[Lease]:
        self._work.clear()
        now = self._clock()
        values = {"owner": owner, "limit": limit, "now": now, "until": now + lease_seconds}
        values["pools"] = None if pools is None else to_json(sorted(pools)).decode()
        values["waits"] = None if waits is None else to_json(dict(waits)).decode()
        try:
            leases, cancelled, due = await self._thread.write(statements.claim, values)
        except StoreError:
            self._work.set()  # what was there is there still
            raise
        self._due = due
        self._announce(cancelled)
        if len(leases) == limit:
            self._work.set()  # there may be more
        return leases

    async def renew(self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float) -> list[str]:
        ids = to_json(rollout_ids).decode()
        values = {"owner": owner, "ids": ids, "until": self._clock() + lease_seconds}
        renewed = await self._thread.write(lambda db: db.execute(statements.RENEW, values).fetchall())
        return sorted(set(rollout_ids) - {row["rollout_id"] for row in renewed})

    async def recover(self, owner: str) -> int:
        # Only this process can have the file open, so every other owner is gone.
        return await self._requeue(statements.RECOVER, owner, None)

    async def release(self, owner: str, rollout_ids: Sequence[str] | None = None) -> int:
        return await self._requeue(statements.RELEASE, owner, rollout_ids)

    async def _requeue(self, statement: str, owner: str, rollout_ids: Sequence[str] | None) -> int:
        ids = None if rollout_ids is None else to_json(rollout_ids).decode()
        values = {"owner": owner, "ids": ids, "now": self._clock()}
        return self._requeued(await self._thread.write(lambda db: db.execute(statement, values).fetchall()))

    async def held(self, owner: str, *, believed: Mapping[str, int] | None = None) -> Mapping[str, int]:  # noqa: ARG002 - it knows better
        rows = await self._thread.read(lambda db: db.execute(statements.HELD, {"owner": owner}).fetchall())
        return {row["rollout_id"]: row["token"] for row in rows}

    async def advance(self, lease: Lease, owner: str, state: RolloutState) -> bool:
        if state not in _STAGES[1:]:
            raise ValueError(f"a leased rollout cannot advance to {state}")
        before = _STAGES[: _STAGES.index(state) + 1]
        values = self._held(lease, owner) | {"state": state, "before": to_json(before).decode()}
        return await self._thread.write(statements.advance, values)

    async def retry(
        self,
        lease: Lease,
        owner: str,
        error: ErrorInfo,
        *,
        spans: Sequence[Span] = (),
        delay_seconds: float = 0.0,
        keep_turns: bool = False,
    ) -> bool:
        values = self._held(lease, owner) | {"error": error.model_dump_json(), "code": error.code}
        values["spans"] = codec.encode_spans(spans)
        values["not_before"] = values["now"] + delay_seconds

        def retry(db: sqlite3.Connection) -> list[sqlite3.Row]:
            rows = db.execute(statements.RETRY, values).fetchall()
            if rows and not keep_turns:
                statements.delete(db, values)
            return rows

        return self._requeued(await self._thread.write(retry)) > 0

    async def restart(self, lease: Lease, owner: str, *, spans: Sequence[Span] = (), kept_turns: int = 0) -> bool:
        values = self._held(lease, owner) | {"spans": codec.encode_spans(spans), "kept": kept_turns}
        return self._requeued(await self._thread.write(statements.restart, values)) > 0

    def _requeued(self, rows: Sequence[sqlite3.Row]) -> int:
        """Return how many rollouts there are."""
        self._announce(row["rollout_id"] for row in rows if row["state"] == RolloutState.CANCELLED)
        self._work.set()
        return len(rows)

    save_turns = writes(statements.save)
    saved_turns = reads(statements.saved)
    save_steps = writes(statements.save_steps)
    saved_steps = reads(statements.saved_steps)

    async def finish(self, lease: Lease, owner: str, result: Rollout) -> bool:
        values = self._held(lease, owner)
        text, tokens = await codec.encode_finished(lease, result)
        values |= {
            "state": result.state,
            "reward": result.reward,
            "stop_reason": result.stop_reason,
            "code": result.error.code if result.error else None,
            "result": text,
            "trajectory": tokens,
        }
        values |= codec.version_range(result.trajectory) | summary_codec.figures(result)
        done = await self._thread.write(statements.finish, values)
        if done:
            self._announce([lease.rollout_id])
        return done

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        values = {"id": rollout_id, "now": self._clock()}
        state, ended = await self._thread.write(statements.cancel, values)
        if ended:
            self._announce([rollout_id])
        self._cancels.set()
        return state

    async def cancel_requested(self, owner: str) -> list[str]:
        self._cancels.clear()
        rows = await self._thread.read(lambda db: db.execute(statements.CANCEL_REQUESTED, (owner,)).fetchall())
        return [row["rollout_id"] for row in rows]

    async def get(self, rollout_id: str, *, whole_tree: bool = False) -> Rollout | None:
        shown = codec.Shown.ALL if whole_tree else codec.Shown.REQUESTED
        return await self._thread.read(statements.get, rollout_id, shown)

    async def _tokens(self, rollout_id: str) -> bytes | None:
        row = await self._thread.read(lambda db: db.execute(statements.TRAJECTORY, (rollout_id,)).fetchone())
        return None if row is None else row["trajectory"]

    async def tree(self, rollout_id: str, *, trajectories: bool = False) -> RolloutNodes | None:
        row = await self._thread.read(statements.tree, rollout_id, with_trajectories=trajectories)
        return None if row is None else await anyio.to_thread.run_sync(codec.decode_tree, row)

    async def _summaries(
        self, which: SummaryFilter, order: SummaryOrder, after: int | None, limit: int
    ) -> tuple[Sequence[RolloutSummary], int | None]:
        rows = list[RolloutSummary]()
        for _ in range(LOOKED_AT // ROWS_AT_ONCE):
            search = SummarySearch(which, order, after, limit - len(rows))
            found = await self._thread.read(look, search)
            rows += [summary_codec.decode_summary(row) for row in found.rows]
            after = found.next
            if after is None or len(rows) == limit:
                break
        return rows, after

    counts = reads(statements.counts)
    _page = reads(statements.page)

    async def record(self, kind: str, subject: str, data: dict[str, JsonValue]) -> Event:
        now = self._clock()
        values = {"now": now, "kind": kind, "subject": subject, "data": to_json(data).decode()}
        event_id = await self._thread.write(lambda db: db.execute(statements.RECORD, values).lastrowid)
        return Event(event_id=event_id or 0, time=codec.when(now), kind=kind, subject=subject, data=data)

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        return await self._thread.read(
            lambda db: [codec.decode_event(row) for row in db.execute(statements.EVENTS, (after, limit))]
        )

    last_event = reads(newest_event)

    async def wait_for_work(self) -> None:
        with anyio.move_on_after(max(0.0, self._due - self._clock())):
            await self._work.wait()

    async def wait_for_cancels(self) -> None:
        await self._cancels.wait()

    async def wait_for_events(self, *, after: int) -> int:
        newest = self._newest_event
        return newest.value if newest.value < after else await newest.wait_above(after)

    async def wait_for_result(self, rollout_id: str) -> Rollout | None:
        ended = self._results.get(rollout_id)  # before reading, so that no change is missed
        rollout = await self.get(rollout_id)
        if rollout is None or rollout.state.terminal:
            return rollout
        await ended.wait()
        return await self.get(rollout_id)

    def _held(self, lease: Lease, owner: str) -> dict[str, Any]:
        return {"id": lease.rollout_id, "owner": owner, "token": lease.token, "now": self._clock()}

    def _announce(self, ended: Iterable[str]) -> None:
        for rollout_id in ended:
            self._results.set(rollout_id)
            self._runs.rollout_ended()
