"""Runs, groups and batches in the SQLite store, which creates and closes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import anyio.to_thread

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import RunRequest, RunState
from api_schemas.tasks import Task
from rollout_service.base.signals import MonotonicCounter
from rollout_service.settings import RetentionSettings
from rollout_service.store import rules
from rollout_service.store.base import BaseRuns
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.record import fingerprint
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    GroupHead,
    NewGroup,
    NoBatch,
    OpenGroup,
    RunRecord,
)
from rollout_service.store.sqlite import batch_statements, erasure_statements, run_statements
from rollout_service.store.sqlite.lists import history
from rollout_service.store.sqlite.lists.groups import look_at_groups
from rollout_service.store.sqlite.thread import DatabaseThread, reads, writes


class RunSignals:
    """Wakes those who wait for runs."""

    def __init__(self) -> None:
        self.changes = MonotonicCounter(1)
        self.deliveries = MonotonicCounter(1)

    def changed(self) -> None:
        """Wake everyone: what a lease returns may have changed."""
        self.changes.increment()
        self.deliveries.increment()


class SqliteRuns(BaseRuns):
    """The runs of one store."""

    def __init__(
        self, thread: DatabaseThread, clock: Callable[[], float], work_added: Callable[[], None]
    ) -> None:
        """`work_added` is called after rollouts were queued."""
        self._signals = RunSignals()
        self._thread = thread
        self._clock = clock
        self._work_added = work_added

    def deliveries(self, run_id: str) -> int:
        del run_id  # who waits for another run looks once too often
        return self._signals.deliveries.value

    async def wait_for_delivery(self, run_id: str, after: int) -> int:
        del run_id
        return await self._signals.deliveries.wait_above(after)

    async def wait_for_change(self, after: int) -> int:
        return await self._signals.changes.wait_above(after)

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
        created = await self._thread.write(run_statements.create, values, request)
        self._signals.changed()
        return created

    get = reads(run_statements.get)
    list = reads(run_statements.list_runs)
    active = reads(run_statements.active_runs)

    async def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        version: int | None = None,
        request: RunRequest | None = None,
        problem: ErrorInfo | None = None,
    ) -> RunRecord:
        record = await self._thread.write(
            run_statements.update,
            run_id,
            now=self._clock(),
            state=state,
            version=version,
            request=request,
            problem=problem,
        )
        self._signals.changed()
        return record

    async def append(
        self, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool
    ) -> RunRecord:
        record = await self._thread.write(
            run_statements.append, run_id, tasks, offset=offset, close=close, now=self._clock()
        )
        self._signals.changed()
        return record

    inline_tasks = reads(run_statements.inline_tasks)

    async def start_groups(self, run_id: str, groups: Sequence[NewGroup]) -> int:
        started = await self._thread.write(run_statements.start_groups, run_id, groups, self._clock())
        self._work_added()
        return started

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        return await self._thread.read(run_statements.open_groups, run_id, self._clock())

    async def extend_group(
        self, run_id: str, number: int, first: int, requests: Sequence[RolloutRequest]
    ) -> None:
        now = self._clock()
        await self._thread.write(run_statements.extend_group, run_id, number, first, requests, now)
        self._work_added()

    async def retry_sample(self, run_id: str, number: int, sample: int, request: RolloutRequest) -> None:
        await self._thread.write(run_statements.retry_sample, run_id, number, sample, request, self._clock())
        self._work_added()

    mark_stragglers = writes(run_statements.mark_stragglers)
    cancel_groups = writes(run_statements.cancel_groups)

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        head = await self._head_at_close(run_id, closure)
        await self._thread.write(run_statements.close_group, run_id, closure, head, self._clock())
        self._signals.changed()

    ready_groups = reads(batch_statements.ready_groups)

    async def stale_groups(self, run_id: str, bound: int) -> Sequence[OpenGroup]:
        return await self._thread.write(batch_statements.stale_groups, run_id, bound, self._clock())

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        head = await self._head_at_close(run_id, closure)
        await self._thread.write(run_statements.reclose_group, run_id, closure, head, self._clock())
        self._signals.changed()

    async def _head_at_close(self, run_id: str, closure: GroupClosure) -> Mapping[str, Any] | None:
        """Return the head to store with a group that is about to be kept; None while a rollout of it could change."""
        if closure.reason is not None:
            return None
        row, members = await self._thread.read(batch_statements.read_closing, run_id, closure)
        ended = all(RolloutState(member["state"]).terminal for member in members)
        if row is None or not ended or len(members) < len(closure.samples):
            return None
        return await anyio.to_thread.run_sync(group_codec.encode_head, row, members)

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        leased = await self._thread.write(batch_statements.lease, order, self._clock())
        if isinstance(leased, BatchLease):
            self._signals.changes.increment()
        return leased

    async def renew_batch(self, run_id: str, batch: int, *, key: str | None, seconds: float) -> datetime:
        until = self._clock() + seconds
        await self._thread.write(batch_statements.renew, run_id, batch, key, until)
        return codec.when(until)

    async def acknowledge(self, run_id: str, batch: int) -> None:
        await self._thread.write(batch_statements.acknowledge, run_id, batch, self._clock())
        self._signals.changed()

    async def give_back(self, run_id: str, batch: int) -> None:
        await self._thread.write(batch_statements.give_back, run_id, batch, self._clock())
        self._signals.changed()

    group_states = reads(run_statements.group_states)

    async def _history(self, run_id: str) -> tuple[Sequence[bytes], Mapping[str, int]]:
        run, counters = await self._thread.read(run_statements.seq_and_counters, run_id)
        parts: dict[int, bytes] = {}
        while some := await self._thread.read(history.read_from, run, max(parts, default=-1) + 1):
            parts.update(some)
        return list(parts.values()), counters

    _groups = reads(look_at_groups)
    _group = reads(batch_statements.read_group)

    async def _heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead | None]:
        rows = await self._thread.read(batch_statements.read_heads, run_id, numbers)
        return await anyio.to_thread.run_sync(lambda: [group_codec.decode(row) for row in rows])

    _whole_rows = reads(batch_statements.read_rollouts)
    _trajectories = reads(batch_statements.read_trajectories)
    closed_groups = reads(batch_statements.closed_groups)
    rollout_ids = reads(batch_statements.rollout_ids)

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        return await self._thread.write(
            run_statements.prune, run_id, seconds=seconds, max_bytes=max_bytes, now=self._clock()
        )

    rollouts_of = reads(erasure_statements.rollouts_of)
    overwrite_deleted = writes(erasure_statements.overwrite_deleted)

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        batches = await self._thread.write(erasure_statements.erase, rollout_ids, self._clock())
        await self._thread.truncate_log()
        self._signals.changed()
        return batches

    async def delete_expired(self, keep: RetentionSettings) -> int:
        return await self._thread.write(erasure_statements.delete_expired, keep, self._clock())

    def fenced(self, lease: RoleLease) -> SqliteRuns:  # noqa: ARG002 - of the contract
        return self  # no other service can have the file open

    def rollout_ended(self) -> None:
        """Wake those who wait for changes, since a rollout has ended."""
        self._signals.changes.increment()
