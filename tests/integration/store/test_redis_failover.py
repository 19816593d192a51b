"""After a failover, everyone goes on from what the new primary has, also if it lacks the last writes."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from api_schemas.rollouts import Rollout, RolloutState
from rollout_service.base.errors import StoreError
from rollout_service.store.redis import RedisStore
from tests.support.redis_failover import RedisPair, redis_pair
from tests.support.store.rollouts import completed, order, persistently
from tests.support.store.servers import redis_store
from tests.support.waiting import collect, until

pytestmark = pytest.mark.redis

PATIENCE_SECONDS = 30
S = RolloutState


@pytest.fixture
def pair() -> Iterator[RedisPair]:
    with redis_pair() as made:
        yield made


def opened(pair: RedisPair, **changes: int) -> AbstractAsyncContextManager[RedisStore]:
    config = pair.config("failover", answer_seconds=3.0, **changes)
    return redis_store(config, is_gone=lambda _: False)


async def test_a_failover_to_a_replica_that_has_everything_loses_nothing(pair):
    async with opened(pair, replicas=1) as store:
        for number in range(3):
            await store.submit(order(f"r{number}"))
        leases = await store.claim("a", limit=2, lease_seconds=100)
        assert await store.finish(leases[0], "a", completed(leases[0]))
        rewinds = store.rewinds
        pair.fail_over()
        assert await persistently(store.counts) == {S.COMPLETED: 1, S.QUEUED: 2}
        assert store.rewinds > rewinds
        assert await store.held("a") == {"r1": 1}
        pair.replica.do("CONFIG", "SET", "min-replicas-to-write", 0)
        with pytest.raises(StoreError, match="0 of 1"):
            await store.record("test", "x", {})


async def test_a_write_that_no_replica_has_is_not_acknowledged_and_counts_once(pair):
    async with opened(pair, replicas=1) as store:
        await store.submit(order("r0"))
        await store.submit(order("r1"))
        pair.cut_off()
        with pytest.raises(StoreError) as caught:
            await store.claim("a", limit=9, lease_seconds=100)
        assert "redis_replicas" in caught.value.hint
        assert store.problem is not None
        assert await store.counts() == {S.QUEUED: 2}, "reads go on"
        pair.follow()
        leases = await store.claim("a", limit=9, lease_seconds=100)
        assert [lease.rollout_id for lease in leases] == ["r0", "r1"]
        assert [lease.token for lease in leases] == [1, 1]
        assert await store.finish(leases[0], "a", completed(leases[0]))


async def test_those_who_wait_for_events_go_on_from_what_the_new_primary_has(pair):
    async with opened(pair) as store:
        for number in range(2):
            await store.submit(order(f"r{number}"))
        pair.primary.do("WAIT", 1, 10_000)
        pair.cut_off()
        for number in range(2, 9):
            await store.submit(order(f"r{number}"))
        assert await store.last_event() == 9
        told: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, told, lambda: store.wait_for_events(after=9))
            await anyio.wait_all_tasks_blocked()
            pair.fail_over()
            await until(lambda: told, PATIENCE_SECONDS)
        assert told == [2]
        with anyio.fail_after(PATIENCE_SECONDS):
            assert await store.wait_for_events(after=9) == 2, "who comes later is told as well"
            await persistently(lambda: store.submit(order("new")))
            assert await store.wait_for_events(after=2) == 3
        assert [event.subject for event in await store.events(after=2)] == ["new"]


async def test_work_and_results_are_waited_for_anew(pair):
    async with opened(pair) as store:
        await store.submit(order("kept"))
        [lease] = await store.claim("a", limit=9, lease_seconds=100)
        pair.primary.do("WAIT", 1, 10_000)
        pair.cut_off()
        assert await store.finish(lease, "a", completed(lease))
        await store.submit(order("lost"))
        await store.claim("a", limit=9, lease_seconds=100)
        ended: dict[str, Rollout | None] = {}

        async def wait(rollout_id: str) -> None:
            found = await persistently(lambda: store.wait_for_result(rollout_id))
            assert found is None or isinstance(found, Rollout)
            ended[rollout_id] = found

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "lost")
            await anyio.wait_all_tasks_blocked()
            pair.fail_over()
            await persistently(store.counts)
            assert await persistently(lambda: store.held("a")) == {"kept": 1}, "its result is lost"
            await until(lambda: "lost" in ended, PATIENCE_SECONDS)
        assert ended == {"lost": None}
        await store.release("a", ["kept"])
        with anyio.fail_after(PATIENCE_SECONDS):
            await store.wait_for_work()
            [again] = await store.claim("a", limit=9, lease_seconds=100)
            assert await store.finish(again, "a", completed(again))
