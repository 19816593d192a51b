"""The deletion of records that are no longer needed, or may not be kept.

Each step is one change of a run, of a bounded number of groups. Nothing that a trainer still has to acknowledge is
deleted unless a person demands it, nor any rollout that has not ended.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from rollout_service.base.errors import NotFoundError
from rollout_service.base.ids import BatchId, SampleId
from rollout_service.settings import RetentionSettings
from rollout_service.store import rules
from rollout_service.store.redis.runs import run_changes
from rollout_service.store.redis.runs.database import Replies, RunDatabase
from rollout_service.store.redis.runs.records import ClosedRecord, Command, OpenRecord, RunKeys, all_runs, result_read
from rollout_service.store.redis.runs.transaction import RunDraft, RunTransaction, chunks
from rollout_service.store.rules import SettledGroup

if TYPE_CHECKING:
    from rollout_service.store.redis.rollouts import RedisRollouts

DELETED_AT_ONCE = 64
"""Each takes 25 µs of Redis's thread, so that no other call waits for long; a group is deleted as a whole."""
GROUPS_AT_ONCE = 64
"""The most groups that one step deletes, in several calls, or that one change prunes."""
RUNS_AT_ONCE = 128
_UNREAD = -1
"""Stands for all groups that are newer than those that were read."""


class RunRetention:
    def __init__(self, database: RunDatabase, rollouts: RedisRollouts) -> None:
        self._database = database.draining()
        self._rollouts = rollouts

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        batches: dict[str, str] = {}
        for rollout_id in rollout_ids:
            sample = SampleId.parse(rollout_id)
            with suppress(NotFoundError):  # the run is gone, and so is all of it
                batch = await self._erase(sample)
                if batch is not None:
                    batches[rollout_id] = str(BatchId(sample.run, batch))
        return batches

    async def _erase(self, sample: SampleId) -> int | None:
        keys = self._keys(sample.run)

        async def plan(change: RunTransaction, replies: Replies) -> int | None:
            opened, *closed = replies
            ids = _rollouts_of(sample, opened, closed[0])
            _, found = await self._database.read([result_read(self._database.root, one) for one in ids])
            # While Redis still refers to them: after a failure, they are found again when the erasure is repeated.
            await self._rollouts.overwrite([trajectory for _, trajectory in found if trajectory is not None])
            results = {one: result for one, (result, _) in zip(ids, found, strict=True)}
            return run_changes.erase_sample(change, closed, sample.number, results)

        reads = [("HGET", key, sample.number) for key in (keys.open, keys.closed, keys.states)]
        return await self._database.change_in_steps(sample.run, reads, plan)

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        read, total = _oldest(self._keys(run_id).held), 0

        async def plan(change: RunTransaction, replies: Replies) -> int:
            oldest = _scores(replies[0])
            records = await self._database.closed_records(run_id, list(oldest))
            return _prune(change, oldest, records, seconds=seconds, max_bytes=max_bytes)

        while pruned := await self._database.change_in_steps(run_id, [read], plan):
            total += pruned
        return total

    async def delete_expired(self, keep: RetentionSettings) -> int:
        deleted = 0
        if keep.ended_run_seconds is not None:
            deleted += await self._delete_expired_run(keep.ended_run_seconds)
        if keep.settled_group_seconds is not None:
            deleted += await self._delete_settled_groups(keep.settled_group_seconds)
        return deleted

    async def _delete_expired_run(self, age: float) -> int:
        """Delete groups of a run that has expired, and the run itself once it has none left."""
        now, names = await self._runs()
        for some in chunks(names, RUNS_AT_ONCE):
            _, replies = await self._database.read([("HGETALL", self._keys(name).run) for name in some])
            for name, reply in zip(some, replies, strict=True):
                run = RunDraft.from_reply(name, reply)
                if run is not None and _is_expired(run, now - age):
                    return await _delete_many(partial(self._delete, name, now - age))
        return 0

    async def _delete(self, run_id: str, before: float) -> int:
        async def plan(change: RunTransaction, replies: Replies) -> int:
            if not _is_expired(change.run, before):
                return 0
            numbers = list(_scores(replies[0]))
            if not numbers:
                change.delete_run()
                return 1
            return _delete_groups(change, *await self._deletable(run_id, numbers))

        return await self._database.change_in_steps(run_id, [_oldest(self._keys(run_id).settled)], plan)

    async def _delete_settled_groups(self, age: float) -> int:
        """Delete the rollouts of settled groups of this age, but keep the record that the groups existed."""
        now, names = await self._runs()
        deleted = 0
        for some in chunks(names, RUNS_AT_ONCE):
            _, replies = await self._database.read([_oldest(self._keys(name).settled) for name in some])
            for name, reply in zip(some, replies, strict=True):
                if any(settled_at <= now - age for settled_at in _scores(reply).values()):
                    deleted += await _delete_many(partial(self._delete_groups_of, name, now - age))
                if deleted >= GROUPS_AT_ONCE:
                    return deleted
        return deleted

    async def _delete_groups_of(self, run_id: str, before: float) -> int:
        async def plan(change: RunTransaction, replies: Replies) -> int:
            numbers = [number for number, settled_at in _scores(replies[0]).items() if settled_at <= before]
            return _delete_groups(change, *await self._deletable(run_id, numbers)) if numbers else 0

        return await self._database.change_in_steps(run_id, [_oldest(self._keys(run_id).settled)], plan)

    def _keys(self, run_id: str) -> RunKeys:
        return self._database.keys(run_id)

    async def _runs(self) -> tuple[float, list[str]]:
        now, (names,) = await self._database.read([("ZRANGE", all_runs(self._database.root), 0, -1)])
        return now, [name.decode() for name in names]

    async def _deletable(self, run_id: str, numbers: Sequence[int]) -> tuple[dict[int, ClosedRecord], set[int]]:
        """Return also which groups still have trajectories."""
        _, (scores,) = await self._database.read([("ZMSCORE", self._keys(run_id).held, *numbers)])
        held = {number for number, score in zip(numbers, scores, strict=True) if score is not None}
        return await self._database.closed_records(run_id, numbers), held


def _rollouts_of(sample: SampleId, opened: bytes | None, closed: bytes | None) -> list[str]:
    known: list[str] = []
    if opened is not None:
        record = OpenRecord.decode(opened)
        known = [*record.members, *record.earlier]
    elif closed is not None:
        known = ClosedRecord.decode(closed).rollout_ids
    return [one for one in known if replace(SampleId.parse(one), retry=0) == sample]


def _oldest(key: str) -> Command:
    return ("ZRANGE", key, 0, GROUPS_AT_ONCE - 1, "WITHSCORES")


def _scores(reply: Sequence[bytes]) -> dict[int, float]:
    """Return when groups were settled, oldest first, in Unix seconds."""
    return {int(number): float(score) for number, score in zip(reply[::2], reply[1::2], strict=True)}


def _prune(
    change: RunTransaction,
    oldest: Mapping[int, float],
    records: Mapping[int, ClosedRecord],
    *,
    seconds: float | None,
    max_bytes: int | None,
) -> int:
    read = [SettledGroup(number, records[number].size, when) for number, when in oldest.items()]
    newer = change.run["held_bytes"] - sum(group.bytes for group in read)
    settled = [SettledGroup(_UNREAD, newer, math.inf), *reversed(read)]
    limits = rules.groups_to_prune(settled, seconds=seconds, max_bytes=max_bytes, now=change.now)
    pruned = [number for number in limits if number != _UNREAD]
    for number in pruned:
        change.prune_group(number, records[number])
    return len(pruned)


async def _delete_many(delete: Callable[[], Awaitable[int]]) -> int:
    """Stop once none is left or one step has deleted enough; return how many."""
    deleted = 0
    with suppress(NotFoundError):  # the run itself was deleted
        while deleted < GROUPS_AT_ONCE and (some := await delete()):
            deleted += some
    return deleted


def _delete_groups(change: RunTransaction, records: Mapping[int, ClosedRecord], held: Collection[int]) -> int:
    """Delete as many of these groups as one call may; return how many."""
    rollouts = accumulate(len(record.rollout_ids) for record in records.values())
    first = max(1, sum(count <= DELETED_AT_ONCE for count in rollouts))
    some = dict(islice(records.items(), first))
    for number, record in some.items():
        change.delete_group(number, record, is_held=number in held)
    return len(some)


def _is_expired(run: RunDraft, before: float) -> bool:
    """Return whether a run is over and fully acknowledged, and unchanged since a time in Unix seconds."""
    record = run.record
    is_settled = not any(record.count(state) for state in ("open", "ready", "batched"))
    is_old = run["changed_at"] <= before and run["settled_at"] <= before
    return record.state in rules.OVER and is_settled and is_old
