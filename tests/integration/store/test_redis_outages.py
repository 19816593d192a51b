"""A store whose Redis fails loses nothing and repeats nothing: full, silent in the middle of a call, or restarted."""

from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from api_schemas.rollouts import Rollout, RolloutState
from rollout_service.base.errors import StoreError
from rollout_service.store import Lease
from rollout_service.store.redis import RedisStore
from tests.support.redis_server import RedisServer
from tests.support.store.rollouts import completed, order
from tests.support.store.servers import redis_store
from tests.support.waiting import collect, until

pytestmark = pytest.mark.redis

ANSWER_SECONDS = 1.0
LEASE_SECONDS = 100.0
S = RolloutState


def opened(server: RedisServer) -> AbstractAsyncContextManager[RedisStore]:
    return redis_store(server.config("outage", answer_seconds=ANSWER_SECONDS))


async def claim(store: RedisStore, limit: int = 9) -> list[Lease]:
    return await store.claim("a", limit=limit, lease_seconds=LEASE_SECONDS)


async def test_a_full_redis_refuses_work_and_keeps_what_is_under_way(own_redis):
    async with opened(own_redis) as store:
        for number in range(3):
            await store.submit(order(f"r{number}"))
        first, second, third = await claim(store)
        own_redis.do("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreError) as caught:
            await store.submit(order("refused"))
        assert "maxmemory" in caught.value.hint
        assert store.problem is not None
        with pytest.raises(StoreError):
            await store.finish(first, "a", completed(first))
        assert await store.renew("a", ["r0", "r1", "r2"], lease_seconds=LEASE_SECONDS) == []
        assert await store.advance(second, "a", S.ROLLOUT)
        assert await store.cancel("r2") is S.QUEUED
        assert await store.cancel_requested("a") == ["r2"]
        assert await store.release("a", ["r1"]) == 1
        own_redis.do("CONFIG", "SET", "maxmemory", "0")
        assert await store.finish(first, "a", completed(first))
        assert [lease.rollout_id for lease in await claim(store)] == ["r1"]
        assert await store.finish(third, "a", completed(third))
        assert await store.get("refused") is None
        assert await store.counts() == {S.COMPLETED: 2, S.QUEUED: 1}


async def test_a_reader_that_is_cancelled_does_not_wait_for_a_silent_redis(own_redis):
    async with redis_store(own_redis.config("outage", answer_seconds=30.0)) as store:
        with own_redis.paused(), anyio.fail_after(10):
            with anyio.move_on_after(0.1):
                await store.counts()
        assert await store.counts() == {}


async def test_what_a_lost_claim_took_is_queued_again_if_the_next_wants_less(own_redis):
    async with opened(own_redis) as store:
        for number in range(3):
            await store.submit(order(f"r{number}"))
        with own_redis.paused(), pytest.raises(StoreError):
            await claim(store, limit=3)
        [lease] = await claim(store, limit=1)
        assert list(await store.held("a")) == [lease.rollout_id]
        others = await claim(store)
        assert sorted(one.rollout_id for one in (lease, *others)) == ["r0", "r1", "r2"]


async def test_a_result_whose_answer_was_lost_counts_once(own_redis):
    async with opened(own_redis) as store:
        await store.submit(order("r0"))
        [lease] = await claim(store)
        with own_redis.paused(), pytest.raises(StoreError):
            await store.finish(lease, "a", completed(lease))
        assert await store.finish(lease, "a", completed(lease)), "it is this lease's result"
        assert not await store.finish(lease, "a", completed(lease)), "nothing was lost this time"
        events = await store.events(after=0)
        assert [event.data["state"] for event in events] == ["queued", "completed"]


async def test_those_who_wait_are_woken_after_redis_was_restarted(own_redis):
    async with opened(own_redis) as store, opened(own_redis) as other, anyio.create_task_group() as tasks:
        await store.submit(order("r0"))
        [lease] = await claim(store)
        ended: list[Rollout | None] = []
        tasks.start_soon(collect, ended, lambda: other.wait_for_result("r0"))
        await anyio.wait_all_tasks_blocked()
        await other.connection.topics.confirmed("rollout:r0")
        await other.get("r0")  # the waiter's own look came before
        await anyio.wait_all_tasks_blocked()
        own_redis.kill()
        with pytest.raises(StoreError):
            await store.finish(lease, "a", completed(lease))
        own_redis.start()
        assert await store.finish(lease, "a", completed(lease))
        await until(lambda: ended, 20)
        assert ended[0].reward == 1.0
