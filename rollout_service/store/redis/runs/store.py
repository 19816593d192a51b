"""Runs, groups and batches in the Redis store, which several services share.

Beyond the contract: leases of batches run by Redis's clock, and a change made by any service wakes those who wait in
all of them. What drains a run is possible while Redis is full, so that its memory can be freed: leases of batches,
their renewal, acknowledgment and return, pruning and deletion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import anyio.to_thread
from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import InlineTasks, RunRequest, RunState
from api_schemas.tasks import Task
from rollout_service.groups.filters import SURPLUS
from rollout_service.settings import RetentionSettings
from rollout_service.store import rules
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.record import fingerprint, id_taken
from rollout_service.store.redis.runs import batch_changes, run_changes
from rollout_service.store.redis.runs.database import Replies, RunDatabase
from rollout_service.store.redis.runs.reading import GroupReader
from rollout_service.store.redis.runs.records import Command, active_runs, all_runs, erased_read
from rollout_service.store.redis.runs.retention import RunRetention
from rollout_service.store.redis.runs.transaction import RunDraft, RunTransaction, chunks
from rollout_service.store.redis.topics import TopicReader
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    NewGroup,
    NoBatch,
    OpenGroup,
    ReadyGroup,
    RunRecord,
)

if TYPE_CHECKING:
    from rollout_service.store.redis.rollouts import RedisRollouts

RUNS_AT_ONCE = 128
ROLLOUTS_AT_ONCE = 64
"""About the most rollouts that one change starts: queueing them takes Redis some ten milliseconds."""


class RedisRuns(GroupReader):
    def __init__(self, database: RunDatabase, rollouts: RedisRollouts, topics: TopicReader) -> None:
        super().__init__(database, rollouts)
        self._retention = RunRetention(database, rollouts)
        self._topics = topics

    def fenced(self, lease: RoleLease) -> RedisRuns:
        return RedisRuns(self._database.fenced(lease), self._rollouts, self._topics)

    def deliveries(self, run_id: str) -> int:
        return self._topics.changes(f"run:{run_id}")

    async def wait_for_delivery(self, run_id: str, after: int) -> int:
        async with self._topics.watching(f"run:{run_id}") as changes:
            return await changes.wait_above(after)

    async def wait_for_change(self, after: int) -> int:
        async with self._topics.watching("runs") as changes:
            return await changes.wait_above(after)

    async def create(
        self, request: RunRequest, *, tasks: int, digest: str | None, version: int
    ) -> tuple[RunRecord, bool]:
        if request.run_id is None:
            raise ValueError("set the request's run_id before creating the run")
        mark = (await anyio.to_thread.run_sync(fingerprint, request)).hex()
        while (found := await self._draft(request.run_id)) is None:
            fields = {
                "fingerprint": mark,
                "request": run_codec.encode_request(request),
                "state": RunState.RUNNING.value,
                "version": version,
                "first_version": version,
                "tasks": tasks,
                "total": rules.total_tasks(request.source, tasks),
                "digest": digest,
            }
            inline = request.source.tasks if isinstance(request.source, InlineTasks) else ()
            texts = await anyio.to_thread.run_sync(run_codec.encode_tasks, inline)
            if (made := await self._database.create(request.run_id, fields, texts)) is not None:
                return made, True
        if found["fingerprint"] != mark:
            raise id_taken("run", request.run_id)
        return found.record, False

    async def _draft(self, run_id: str) -> RunDraft | None:
        _, (fields,) = await self._database.read([("HGETALL", self._database.keys(run_id).run)])
        return RunDraft.from_reply(run_id, fields)

    async def get(self, run_id: str) -> RunRecord:
        run, _, _ = await self._database.look(run_id)
        return run.record

    async def list(self) -> Sequence[RunRecord]:
        return await self._listed(all_runs(self._database.root))

    async def active(self) -> Sequence[RunRecord]:
        return await self._listed(active_runs(self._database.root))

    async def _listed(self, key: str) -> Sequence[RunRecord]:
        _, (found,) = await self._database.read([("ZRANGE", key, 0, -1)])
        names = [name.decode() for name in found]
        drafts: list[RunDraft | None] = []
        for some in chunks(names, RUNS_AT_ONCE):
            _, replies = await self._database.read([("HGETALL", self._database.keys(name).run) for name in some])
            pairs = zip(some, replies, strict=True)
            drafts += [RunDraft.from_reply(name, reply) for name, reply in pairs]
        return [draft.record for draft in drafts if draft is not None]

    async def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        version: int | None = None,
        changes: Mapping[str, JsonValue] | None = None,
        problem: ErrorInfo | None = None,
    ) -> RunRecord:
        return await self._database.change(
            run_id, [], run_changes.update, state=state, version=version, changes=changes, problem=problem
        )

    async def append(self, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool) -> RunRecord:
        key, reads = self._database.keys(run_id).tasks, list[tuple[str | int, ...]]()
        if offset is not None and tasks:
            reads.append(("LRANGE", key, offset, offset + len(tasks) - 1))
        texts = await anyio.to_thread.run_sync(run_codec.encode_tasks, tasks)
        return await self._database.change(run_id, reads, run_changes.append, tasks, texts, offset=offset, close=close)

    async def inline_tasks(self, run_id: str, *, first: int, limit: int) -> Sequence[Task]:
        if limit <= 0:
            return []
        key = self._database.keys(run_id).tasks
        _, _, (texts,) = await self._database.look(run_id, [("LRANGE", key, first, first + limit - 1)])
        return run_codec.decode_tasks(texts)

    async def start_groups(self, run_id: str, groups: Sequence[NewGroup]) -> int:
        started = 0
        for some in _of_size(groups, ROLLOUTS_AT_ONCE):
            added = await self._database.change(run_id, [], run_changes.start_groups, some)
            started += added
            if added < len(some):
                break
        return started

    async def extend_group(self, run_id: str, number: int, first: int, requests: Sequence[RolloutRequest]) -> None:
        read = self._open(run_id, number)
        await self._database.change(run_id, [read], run_changes.extend_group, number, first, requests)

    async def retry_sample(self, run_id: str, number: int, sample: int, request: RolloutRequest) -> None:
        read = self._open(run_id, number)
        await self._database.change(run_id, [read], run_changes.retry_sample, number, sample, request)

    async def mark_stragglers(self, run_id: str, number: int, samples: Sequence[int]) -> None:
        read = self._open(run_id, number)
        await self._database.change(run_id, [read], run_changes.mark_stragglers, number, samples)

    async def cancel_groups(self, run_id: str, reason: str) -> None:
        read = ("HGETALL", self._database.keys(run_id).open)
        await self._database.change(run_id, [read], run_changes.cancel_groups, reason)

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        size, head = await self._closing(run_id, closure)
        reads = [self._open(run_id, closure.number), *self._erased(closure)]
        await self._database.change(run_id, reads, run_changes.close_group, closure, size=size, head=head)

    def _erased(self, closure: GroupClosure) -> Iterator[Command]:
        for rollout_id in rules.not_erased(closure.samples):
            yield erased_read(self._database.root, rollout_id)

    def _open(self, run_id: str, number: int) -> tuple[str, str, int]:
        return ("HGET", self._database.keys(run_id).open, number)

    async def ready_groups(self, run_id: str) -> Sequence[ReadyGroup]:
        _, _, (reply,) = await self._database.look(run_id, [("HGETALL", self._database.keys(run_id).ready)])
        waiting = batch_changes.read_waiting(reply)
        owners = await self._owners(run_id, list(waiting))
        return [waiting[number].ready(owners.get(number, ())) for number in sorted(waiting)]

    async def stale_groups(self, run_id: str, bound: int) -> Sequence[OpenGroup]:
        keys = self._database.keys(run_id)
        reads = [("HGETALL", keys.out), ("HGETALL", keys.ready)]
        numbers = await self._database.change(run_id, reads, batch_changes.stale_groups, bound)
        return await self._with_members(await self._database.closed_records(run_id, numbers))

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        _, head = await self._closing(run_id, closure)
        keys = self._database.keys(run_id)
        reads: list[Command] = [("HGET", keys.ready, closure.number), ("HGET", keys.closed, closure.number)]
        reads += self._erased(closure)
        await self._database.change(run_id, reads, run_changes.reclose_group, closure, head=head)

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        keys = self._database.keys(order.run_id)

        async def plan(change: RunTransaction, replies: Replies) -> BatchLease | NoBatch:
            batches, waiting = batch_changes.read_batches(replies[0]), batch_changes.read_waiting(replies[1])
            numbers = [*waiting, *(group.number for batch in batches.values() for group in batch.groups)]
            is_live = change.run.record.request.live is not None
            owners = await self._owners(order.run_id, numbers) if is_live else {}
            leased, cancels_open = batch_changes.lease(change, order, batches, waiting, owners)
            if cancels_open:
                _, opened = await self._database.read([("HGETALL", keys.open)])
                run_changes.cancel_groups(change, opened, SURPLUS)
            return leased

        reads = [("HGETALL", keys.out), ("HGETALL", keys.ready)]
        return await self._database.draining().change_in_steps(order.run_id, reads, plan)

    async def renew_batch(self, run_id: str, batch: int, *, key: str | None, seconds: float) -> datetime:
        reads = self._batch(run_id, batch)
        change = self._database.draining().change
        until = await change(run_id, reads, batch_changes.renew, batch, key=key, seconds=seconds)
        return rollout_codec.when(until)

    async def acknowledge(self, run_id: str, batch: int) -> None:
        reads = self._batch(run_id, batch)
        await self._database.draining().change(run_id, reads, batch_changes.acknowledge, batch)

    async def give_back(self, run_id: str, batch: int, *, key: str | None = None) -> None:
        reads = self._batch(run_id, batch)
        await self._database.draining().change(run_id, reads, batch_changes.give_back, batch, key=key)

    def _batch(self, run_id: str, number: int) -> Sequence[tuple[str, str, int]]:
        keys = self._database.keys(run_id)
        return [("HGET", keys.out, number), ("HGET", keys.batches, number)]

    async def rollouts_of(self, user: str) -> Sequence[str]:
        runs = [run.run_id for run in await self.list() if run.request.live is not None]
        return [one for run_id in runs for one in await self._rollouts_of(run_id, user)]

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        return await self._retention.erase(rollout_ids)

    async def overwrite_deleted(self) -> None:
        """Do nothing: Redis keeps what it deletes in its append-only file alone, until that is rewritten."""

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        return await self._retention.prune(run_id, seconds=seconds, max_bytes=max_bytes)

    async def delete_expired(self, keep: RetentionSettings) -> int:
        deleted = await self._retention.delete_expired(keep)
        if keep.rollout_seconds is not None:
            deleted += await self._rollouts.delete_expired(keep.rollout_seconds)
        if not deleted:
            await self._rollouts.collect_garbage()
        return deleted


def _of_size(groups: Sequence[NewGroup], rollouts: int) -> Iterator[Sequence[NewGroup]]:
    """Return the groups in parts of up to `rollouts` rollouts, at least one group each."""
    part: list[NewGroup] = []
    for group in groups:
        if part and sum(len(one.requests) for one in (*part, group)) > rollouts:
            yield part
            part = []
        part.append(group)
    if part:
        yield part
