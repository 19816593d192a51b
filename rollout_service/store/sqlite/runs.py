"""Runs, groups and batches in the SQLite store, which creates and closes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio.to_thread

from api_schemas.rollouts import RolloutState
from api_schemas.runs import RunRequest
from rollout_service.base.signals import MonotonicCounter
from rollout_service.store import rules
from rollout_service.store.base import BaseRuns
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.record import fingerprint
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    GroupHead,
    NoBatch,
    OpenGroup,
    RunRecord,
)
from rollout_service.store.sqlite import batch_statements, erasure_statements, history, run_statements
from rollout_service.store.sqlite.lists import look_at_groups
from rollout_service.store.sqlite.thread import DatabaseThread, reads, writes, writes_now


class SqliteRuns(BaseRuns):
    def __init__(self, thread: DatabaseThread, clock: Callable[[], float], work_added: Callable[[], None]) -> None:
        """`work_added` is called after rollouts were queued."""
        self._changes = MonotonicCounter(1)
        self._deliveries = MonotonicCounter(1)
        self._thread = thread
        self._clock = clock
        self._work_added = work_added

    def _changed(self) -> None:
        """Wake everyone: what a lease returns may have changed."""
        self._changes.increment()
        self._deliveries.increment()

    def _added(self) -> None:
        self._work_added()

    def deliveries(self, run_id: str) -> int:
        del run_id  # who waits for another run looks once too often
        return self._deliveries.value

    async def wait_for_delivery(self, run_id: str, after: int) -> int:
        del run_id
        return await self._deliveries.wait_above(after)

    async def wait_for_change(self, after: int) -> int:
        return await self._changes.wait_above(after)

    async def create(
        self, request: RunRequest, *, tasks: int, digest: str | None, version: int
    ) -> tuple[RunRecord, bool]:
        if request.run_id is None:
            raise ValueError("set the request's run_id before creating the run")
        values = {
            "id": request.run_id,
            "fingerprint": await anyio.to_thread.run_sync(fingerprint, request),
            "request": run_codec.encode_request(request),
            "version": version,
            "tasks": tasks,
            "total": rules.total_tasks(request.source, tasks),
            "digest": digest,
            "now": self._clock(),
        }
        created = await self._thread.write(run_statements.create, values, request)
        self._changed()
        return created

    get = reads(run_statements.get)
    list = reads(run_statements.list_runs)
    active = reads(run_statements.active_runs)

    update = writes_now(run_statements.update, _changed)
    append = writes_now(run_statements.append, _changed)
    inline_tasks = reads(run_statements.inline_tasks)
    start_groups = writes_now(run_statements.start_groups, _added)
    extend_group = writes_now(run_statements.extend_group, _added)
    retry_sample = writes_now(run_statements.retry_sample, _added)

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        return await self._thread.read(run_statements.open_groups, run_id, self._clock())

    mark_stragglers = writes(run_statements.mark_stragglers)
    cancel_groups = writes(run_statements.cancel_groups)

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        head = await self._head_at_close(run_id, closure)
        await self._thread.write(run_statements.close_group, run_id, closure, head, self._clock())
        self._changed()

    ready_groups = reads(batch_statements.ready_groups)
    stale_groups = writes_now(batch_statements.stale_groups)

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        head = await self._head_at_close(run_id, closure)
        await self._thread.write(run_statements.reclose_group, run_id, closure, head, self._clock())
        self._changed()

    async def _head_at_close(self, run_id: str, closure: GroupClosure) -> Mapping[str, Any] | None:
        """Return the head to store with a group; None if it is not kept, or while a rollout of it could change."""
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
            self._changes.increment()
        return leased

    renew_batch = writes_now(batch_statements.renew_batch)
    acknowledge = writes_now(batch_statements.acknowledge, _changed)
    give_back = writes_now(batch_statements.give_back, _changed)
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
    prune = writes_now(run_statements.prune)
    delete_expired = writes_now(erasure_statements.delete_expired)
    rollouts_of = reads(erasure_statements.rollouts_of)
    overwrite_deleted = writes(erasure_statements.overwrite_deleted)

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        batches = await self._thread.write(erasure_statements.erase, rollout_ids, self._clock())
        await self._thread.truncate_log()
        self._changed()
        return batches

    def fenced(self, lease: RoleLease) -> SqliteRuns:  # noqa: ARG002 - of the contract
        return self  # no other service can have the file open

    def rollout_ended(self) -> None:
        self._changes.increment()
