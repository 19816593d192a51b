"""The runs of a store of several shards: each is in one, which does everything that concerns it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from api_schemas.errors import ErrorInfo
from api_schemas.exports import ExportedSample, RecordedRollout
from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import Group, RunRequest, RunState
from api_schemas.runs.history import GroupPage, RunHistory
from api_schemas.tasks import Task
from api_schemas.views.summaries import SummaryOrder
from rollout_service.settings import RetentionSettings
from rollout_service.store.codec.trajectories import Columns
from rollout_service.store.lists_contract import GroupSelection
from rollout_service.store.redis.runs.store import RedisRuns
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
    RunStore,
)
from rollout_service.store.sharded.shard import Shard, ShardAnswers, ask_each


class ShardedRuns(RunStore):
    """The runs of all shards."""

    def __init__(self, shards: Sequence[Shard], shard_of: Callable[[str], int]) -> None:
        self._shards = shards
        self._shard_of = shard_of

    def _at(self, run_id: str) -> RedisRuns:
        return self._shards[self._shard_of(run_id)].present.runs

    def _divided(self, rollout_ids: Sequence[str]) -> Mapping[int, list[str]]:
        found: defaultdict[int, list[str]] = defaultdict(list)
        for name in rollout_ids:
            found[self._shard_of(name)].append(name)
        return found

    # -- all runs ------------------------------------------------------------------

    async def list(self) -> Sequence[RunRecord]:
        return _by_age(await ask_each(self._shards, lambda shard: shard.store.runs.list()))

    async def active(self) -> Sequence[RunRecord]:
        return _by_age(await ask_each(self._shards, lambda shard: shard.store.runs.active()))

    async def recorded_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[RecordedRollout]:
        found: dict[str, RecordedRollout] = {}
        for number, some in self._divided(rollout_ids).items():
            there = await self._shards[number].store.runs.recorded_rollouts(some)
            found |= {one.rollout.rollout_id: one for one in there}
        return [found[name] for name in rollout_ids if name in found]

    async def rollouts_of(self, user: str) -> Sequence[str]:
        answers = await ask_each(self._shards, lambda shard: shard.store.runs.rollouts_of(user))
        return sorted(name for some in answers.whole() for name in some)

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        batches: dict[str, str] = {}
        for number, some in self._divided(rollout_ids).items():
            batches |= await self._shards[number].store.runs.erase(some)
        return batches

    async def overwrite_deleted(self) -> None:
        for shard in self._shards:
            await shard.store.runs.overwrite_deleted()

    async def delete_expired(self, keep: RetentionSettings) -> int:
        answers = await ask_each(self._shards, lambda shard: shard.store.runs.delete_expired(keep))
        return sum(answers.some())

    # -- one run ---------------------------------------------------------------------

    async def create(
        self, request: RunRequest, *, tasks: int, digest: str | None, version: int
    ) -> tuple[RunRecord, bool]:
        if request.run_id is None:
            raise ValueError("set the request's run_id before creating the run")
        return await self._at(request.run_id).create(request, tasks=tasks, digest=digest, version=version)

    async def get(self, run_id: str) -> RunRecord:
        return await self._at(run_id).get(run_id)

    async def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        version: int | None = None,
        request: RunRequest | None = None,
        problem: ErrorInfo | None = None,
    ) -> RunRecord:
        return await self._at(run_id).update(
            run_id, state=state, version=version, request=request, problem=problem
        )

    async def append(
        self, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool
    ) -> RunRecord:
        return await self._at(run_id).append(run_id, tasks, offset=offset, close=close)

    async def inline_tasks(self, run_id: str, *, first: int, limit: int) -> Sequence[Task]:
        return await self._at(run_id).inline_tasks(run_id, first=first, limit=limit)

    async def start_groups(self, run_id: str, groups: Sequence[NewGroup]) -> int:
        return await self._at(run_id).start_groups(run_id, groups)

    async def open_groups(self, run_id: str) -> Sequence[OpenGroup]:
        return await self._at(run_id).open_groups(run_id)

    async def extend_group(
        self, run_id: str, number: int, first: int, requests: Sequence[RolloutRequest]
    ) -> None:
        await self._at(run_id).extend_group(run_id, number, first, requests)

    async def retry_sample(self, run_id: str, number: int, sample: int, request: RolloutRequest) -> None:
        await self._at(run_id).retry_sample(run_id, number, sample, request)

    async def mark_stragglers(self, run_id: str, number: int, samples: Sequence[int]) -> None:
        await self._at(run_id).mark_stragglers(run_id, number, samples)

    async def cancel_groups(self, run_id: str, reason: str) -> None:
        await self._at(run_id).cancel_groups(run_id, reason)

    async def close_group(self, run_id: str, closure: GroupClosure) -> None:
        await self._at(run_id).close_group(run_id, closure)

    async def ready_groups(self, run_id: str) -> Sequence[ReadyGroup]:
        return await self._at(run_id).ready_groups(run_id)

    async def stale_groups(self, run_id: str, bound: int) -> Sequence[OpenGroup]:
        return await self._at(run_id).stale_groups(run_id, bound)

    async def reclose_group(self, run_id: str, closure: GroupClosure) -> None:
        await self._at(run_id).reclose_group(run_id, closure)

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        return await self._at(order.run_id).lease(order)

    async def renew_batch(self, run_id: str, batch: int, *, key: str | None, seconds: float) -> datetime:
        return await self._at(run_id).renew_batch(run_id, batch, key=key, seconds=seconds)

    async def acknowledge(self, run_id: str, batch: int) -> None:
        await self._at(run_id).acknowledge(run_id, batch)

    async def give_back(self, run_id: str, batch: int) -> None:
        await self._at(run_id).give_back(run_id, batch)

    async def group_states(self, run_id: str) -> Mapping[int, str]:
        return await self._at(run_id).group_states(run_id)

    async def group(self, run_id: str, number: int) -> Group:
        return await self._at(run_id).group(run_id, number)

    async def group_heads(self, run_id: str, numbers: Sequence[int]) -> Sequence[GroupHead]:
        return await self._at(run_id).group_heads(run_id, numbers)

    async def columns(self, run_id: str, number: int) -> Sequence[Columns]:
        return await self._at(run_id).columns(run_id, number)

    async def closed_groups(self, run_id: str) -> Sequence[int]:
        return await self._at(run_id).closed_groups(run_id)

    async def exported_samples(self, run_id: str, number: int) -> Sequence[ExportedSample]:
        return await self._at(run_id).exported_samples(run_id, number)

    async def rollout_ids(self, run_id: str) -> Sequence[str]:
        return await self._at(run_id).rollout_ids(run_id)

    async def group_page(
        self,
        run_id: str,
        which: GroupSelection,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> GroupPage:
        return await self._at(run_id).group_page(run_id, which, order=order, cursor=cursor, limit=limit)

    async def history(self, run_id: str, *, points: int) -> RunHistory:
        return await self._at(run_id).history(run_id, points=points)

    async def prune(self, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
        return await self._at(run_id).prune(run_id, seconds=seconds, max_bytes=max_bytes)

    def deliveries(self, run_id: str) -> int:
        return self._at(run_id).deliveries(run_id)

    async def wait_for_delivery(self, run_id: str, after: int) -> int:
        return await self._at(run_id).wait_for_delivery(run_id, after)


def _by_age(answers: ShardAnswers[Sequence[RunRecord]]) -> Sequence[RunRecord]:
    """Return the runs of all shards that answered, oldest first."""
    return sorted((run for some in answers.some() for run in some), key=lambda run: run.created_at)
