"""The runs of a store of several shards: each is in one, which does everything that concerns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from api_schemas.exports import RecordedRollout
from rollout_service.settings import RetentionSettings
from rollout_service.store.redis.runs.store import RedisRuns
from rollout_service.store.runs_contract import RunRecord, RunStore
from rollout_service.store.sharded.shard import Shard, ShardAnswers, ask_each, divided, in_its_shard


class ShardedRuns(RunStore):
    def __init__(self, shards: Sequence[Shard], shard_of: Callable[[str], int]) -> None:
        self._shards = shards
        self._shard_of = shard_of

    def at_shard_of(self, run_id: str) -> RedisRuns:
        return self._shards[self._shard_of(run_id)].present.runs

    async def list(self) -> Sequence[RunRecord]:
        return _by_age(await ask_each(self._shards, lambda shard: shard.store.runs.list()))

    async def active(self) -> Sequence[RunRecord]:
        return _by_age(await ask_each(self._shards, lambda shard: shard.store.runs.active()))

    async def recorded_rollouts(self, rollout_ids: Sequence[str]) -> Sequence[RecordedRollout]:
        found: dict[str, RecordedRollout] = {}
        for number, some in divided(rollout_ids, self._shard_of).items():
            there = await self._shards[number].store.runs.recorded_rollouts(some)
            found |= {one.rollout.rollout_id: one for one in there}
        return [found[name] for name in rollout_ids if name in found]

    async def rollouts_of(self, user: str) -> Sequence[str]:
        answers = await ask_each(self._shards, lambda shard: shard.store.runs.rollouts_of(user))
        return sorted(name for some in answers.whole() for name in some)

    async def erase(self, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        batches: dict[str, str] = {}
        for number, some in divided(rollout_ids, self._shard_of).items():
            batches |= await self._shards[number].store.runs.erase(some)
        return batches

    async def overwrite_deleted(self) -> None:
        for shard in self._shards:
            await shard.store.runs.overwrite_deleted()

    async def delete_expired(self, keep: RetentionSettings) -> int:
        answers = await ask_each(self._shards, lambda shard: shard.store.runs.delete_expired(keep))
        return sum(answers.some())

    create = in_its_shard(RunStore.create, lambda request: request.run_id or "")
    lease = in_its_shard(RunStore.lease, lambda order: order.run_id)
    get = in_its_shard(RunStore.get)
    update = in_its_shard(RunStore.update)
    append = in_its_shard(RunStore.append)
    inline_tasks = in_its_shard(RunStore.inline_tasks)
    start_groups = in_its_shard(RunStore.start_groups)
    open_groups = in_its_shard(RunStore.open_groups)
    extend_group = in_its_shard(RunStore.extend_group)
    retry_sample = in_its_shard(RunStore.retry_sample)
    mark_stragglers = in_its_shard(RunStore.mark_stragglers)
    cancel_groups = in_its_shard(RunStore.cancel_groups)
    close_group = in_its_shard(RunStore.close_group)
    ready_groups = in_its_shard(RunStore.ready_groups)
    stale_groups = in_its_shard(RunStore.stale_groups)
    reclose_group = in_its_shard(RunStore.reclose_group)
    renew_batch = in_its_shard(RunStore.renew_batch)
    acknowledge = in_its_shard(RunStore.acknowledge)
    give_back = in_its_shard(RunStore.give_back)
    group_states = in_its_shard(RunStore.group_states)
    group = in_its_shard(RunStore.group)
    group_heads = in_its_shard(RunStore.group_heads)
    columns = in_its_shard(RunStore.columns)
    closed_groups = in_its_shard(RunStore.closed_groups)
    exported_samples = in_its_shard(RunStore.exported_samples)
    rollout_ids = in_its_shard(RunStore.rollout_ids)
    group_page = in_its_shard(RunStore.group_page)
    history = in_its_shard(RunStore.history)
    prune = in_its_shard(RunStore.prune)
    deliveries = in_its_shard(RunStore.deliveries)
    wait_for_delivery = in_its_shard(RunStore.wait_for_delivery)


def _by_age(answers: ShardAnswers[Sequence[RunRecord]]) -> Sequence[RunRecord]:
    return sorted((run for some in answers.some() for run in some), key=lambda run: run.created_at)
