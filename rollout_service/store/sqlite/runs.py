"""Runs, groups and batches in the SQLite store, which creates and closes them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import RunRequest, RunState
from api_schemas.runs.history import GroupPage, RunHistory
from api_schemas.tasks import Task
from api_schemas.views.summaries import SummaryOrder
from rollout_service.settings import RetentionSettings
from rollout_service.store import rules
from rollout_service.store.base import BaseRuns, RunSignals
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import heads as head_codec
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.groups import make_row
from rollout_service.store.codec.history import make_history
from rollout_service.store.codec.record import Row, fingerprint
from rollout_service.store.codec.summaries import decode_cursor, encode_cursor
from rollout_service.store.columns import Columns
from rollout_service.store.lists_contract import GroupSelection
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    GroupHead,
    NewGroup,
    NoBatch,
    OpenGroup,
    ReadyGroup,
    RunRecord,
)
from rollout_service.store.sqlite import (
    batch_statements,
    erasure_statements,
    retention_statements,
    run_statements,
)
from rollout_service.store.sqlite.lists import history
from rollout_service.store.sqlite.lists.groups import StoredGroups, look_at_groups
from rollout_service.store.sqlite.thread import DatabaseThread

T = TypeVar("T")


class SqliteRuns(BaseRuns):
    """The runs of one store."""

    def __init__(
        self, thread: DatabaseThread, clock: Callable[[], float], work_added: Callable[[], None]
    ) -> None:
        """`work_added` is called after rollouts were queued."""
        super().__init__(RunSignals())
        self._thread = thread
        self._clock = clock
        self._work_added = work_added

    async def create(
        self, request: RunRequest, *, tasks: int, digest: str | None, version: int
    ) -> tuple[RunRecord, bool]:
        if request.run_id is None:
            raise ValueError("set the request's run_id before creating the run")
        values = {
            "id": request.run_id,
            "fingerprint": fingerprint(request),
            "request": run_codec.encode_request(request),
            "version": version,
            "tasks": tasks,
            "total": rules.total_tasks(request.source, tasks),
            "digest": digest,
            "now": self._clock(),
        }
        created = await self._write(lambda db: run_statements.create(db, values, request))
        self._signals.changed()
        return created

    async def get(self, run_id: str) -> RunRecord:
        return await self._read(lambda db: run_statements.get(db, run_id))

    async def list(self) -> Sequence[RunRecord]:
        return await self._read(lambda db: run_statements.list_runs(db, active=False))

    async def active(self) -> Sequence[RunRecord]:
        return await self._read(lambda db: run_statements.list_runs(db, active=True))

    async def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        version: int | None = None,
        request: RunRequest | None = None,
        problem: ErrorInfo | None = None,
    ) -> RunRecord:
        now = self._clock()
        record = await self._write(
            lambda db: run_statements.update(
                db, run_id, now=now, state=state, version=version, request=request, problem=problem
            )
        )
        self._signals.changed()
        return record

    async def append(
        self, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool
    ) -> RunRecord:
        now = self._clock()
        record = await self._write(
            lambda db: run_statements.append(db, run_id, tasks, offset=offset, close=close, now=now)
        )
        self._signals.changed()
        return record

    async def inline_tasks(self, run_id: str, *, first: int, limit: int) -> Sequence[Task]:
        return await self._read(lambda db: run_statements.inline_tasks(db, run_id, first, limit))

    async def start_groups(self, run_id: str, groups: Sequence[NewGroup]) -> int:
        now = self._clock()
        started = await self._write(lambda db: run_statements.start_groups(db, run_id, groups, now))
        self._work_added()
        return started

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        now = self._clock()
        return await self._read(lambda db: run_statements.open_groups(db, run_id, now))

    async def retry_sample(self, run_id: str, number: int, sample: int, request: RolloutRequest) -> None:
        now = self._clock()
        await self._write(lambda db: run_statements.retry_sample(db, run_id, number, sample, request, now))
        self._work_added()

    async def mark_stragglers(self, run_id: str, number: int, samples: Sequence[int]) -> None:
        await self._write(lambda db: run_statements.mark_stragglers(db, run_id, number, samples))

    async def cancel_groups(self, run_id: str, reason: str) -> None:
        def job(db: sqlite3.Connection) -> None:
            run_statements.cancel_groups(db, run_statements.row_of(db, run_id)["seq"], reason)

        await self._write(job)

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        head = await self._head_at_close(run_id, closure)
        now = self._clock()
        await self._write(lambda db: run_statements.close_group(db, run_id, closure, head, now))
        self._signals.changed()

    async def ready_groups(self, run_id: str) -> Sequence[ReadyGroup]:
        return await self._read(lambda db: batch_statements.ready_groups(db, run_id))

    async def stale_groups(self, run_id: str, bound: int) -> Sequence[OpenGroup]:
        now = self._clock()
        return await self._write(lambda db: batch_statements.stale_groups(db, run_id, bound, now))

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        head = await self._head_at_close(run_id, closure)
        now = self._clock()
        await self._write(lambda db: run_statements.reclose_group(db, run_id, closure, head, now))
        self._signals.changed()

    async def _head_at_close(self, run_id: str, closure: GroupClosure) -> Mapping[str, Any] | None:
        """Return the head to store with a group that is about to be kept; None while a rollout of it could change."""
        if closure.reason is not None:
            return None
        row, members = await self._read(lambda db: batch_statements.read_closing(db, run_id, closure))
        ended = all(RolloutState(member["state"]).terminal for member in members)
        if row is None or not ended or len(members) < len(closure.samples):
            return None
        return await anyio.to_thread.run_sync(group_codec.encode_head, row, members)

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        now = self._clock()
        leased = await self._write(lambda db: batch_statements.lease(db, order, now))
        if isinstance(leased, BatchLease):
            self._signals.changes.increment()
        return leased

    async def renew_batch(self, run_id: str, batch: int, *, key: str | None, seconds: float) -> datetime:
        until = self._clock() + seconds
        await self._write(lambda db: batch_statements.renew(db, run_id, batch, key, until))
        return codec.when(until)

    async def acknowledge(self, run_id: str, batch: int) -> None:
        now = self._clock()
        await self._write(lambda db: batch_statements.acknowledge(db, run_id, batch, now))
        self._signals.changed()

    async def give_back(self, run_id: str, batch: int) -> None:
        now = self._clock()
        await self._write(lambda db: batch_statements.give_back(db, run_id, batch, now))
        self._signals.changed()

    async def group_states(self, run_id: str) -> Mapping[int, str]:
        return await self._read(lambda db: run_statements.group_states(db, run_id))

    async def group_page(
        self,
        run_id: str,
        which: GroupSelection,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> GroupPage:
        after = decode_cursor(order, cursor)

        def look(db: sqlite3.Connection) -> StoredGroups:
            run = run_statements.row_of(db, run_id)["seq"]
            return look_at_groups(db, run, which, order=order, after=after, limit=limit)

        found = await self._read(look)
        rows = [make_row(group, found.rollouts) for group in found.groups]
        return GroupPage(groups=rows, next_cursor=encode_cursor(order, found.next))

    async def history(self, run_id: str, *, points: int) -> RunHistory:
        run, counters = await self._read(lambda db: run_statements.seq_and_counters(db, run_id))
        parts: dict[int, bytes] = {}
        while some := await self._read(partial(history.read_from, run=run, part=max(parts, default=-1) + 1)):
            parts.update(some)
        dropped = rules.dropped_counts(counters)
        return await anyio.to_thread.run_sync(_history, run_id, parts, dropped, points)

    async def _group(self, run_id: str, number: int) -> tuple[Row, Sequence[Row]]:
        return await self._read(lambda db: batch_statements.read_group(db, run_id, number))

    async def _heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead | None]:
        rows = await self._read(lambda db: batch_statements.read_heads(db, run_id, numbers))
        return await anyio.to_thread.run_sync(lambda: [head_codec.decode(row) for row in rows])

    async def _whole_rows(self, rollout_ids: Sequence[str]) -> Sequence[Row]:
        return await self._read(lambda db: batch_statements.read_rollouts(db, rollout_ids))

    async def columns(self, run_id: str, number: int) -> Sequence[Columns]:
        packed = await self._read(lambda db: batch_statements.read_trajectories(db, run_id, number))
        return await anyio.to_thread.run_sync(group_codec.locate_columns, packed)

    async def closed_groups(self, run_id: str) -> Sequence[int]:
        return await self._read(lambda db: batch_statements.closed_groups(db, run_id))

    async def rollout_ids(self, run_id: str) -> Sequence[str]:
        return await self._read(lambda db: batch_statements.rollout_ids(db, run_id))

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        now = self._clock()
        return await self._write(
            lambda db: run_statements.prune(db, run_id, seconds=seconds, max_bytes=max_bytes, now=now)
        )

    async def rollouts_of(self, user: str) -> Sequence[str]:
        return await self._read(lambda db: erasure_statements.rollouts_of(db, user))

    async def overwrite_deleted(self) -> None:
        await self._write(erasure_statements.overwrite_deleted)

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        now = self._clock()
        batches = await self._write(lambda db: erasure_statements.erase(db, rollout_ids, now))
        await self._thread.truncate_log()
        self._signals.changed()
        return batches

    async def delete_expired(self, keep: RetentionSettings) -> int:
        now = self._clock()
        return await self._write(lambda db: retention_statements.delete_expired(db, keep, now))

    def fenced(self, lease: RoleLease) -> SqliteRuns:  # noqa: ARG002 - of the contract
        return self  # no other service can have the file open

    def rollout_ended(self) -> None:
        """Wake those who wait for changes, since a rollout has ended."""
        self._signals.changes.increment()

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._thread.run(job, writes=True)

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._thread.run(job, writes=False)


def _history(run_id: str, parts: Mapping[int, bytes], reasons: Mapping[str, int], points: int) -> RunHistory:
    return make_history(run_id, b"".join(parts.values()), reasons, points)
