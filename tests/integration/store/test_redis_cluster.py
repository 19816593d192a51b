"""A store in a Redis Cluster: it is where its slot is, follows it when it moves, and goes on after a failover."""

from collections.abc import Iterator

import anyio
import pytest

from api_schemas.rollouts import RolloutState
from rollout_service.store.redis import RedisStore
from tests.support.redis_cluster import RedisCluster, redis_cluster
from tests.support.store.rollouts import completed, order, persistently

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

S = RolloutState


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as started:
        yield started


@pytest.mark.parametrize("number", range(4))
async def test_a_store_is_at_the_node_that_has_its_slot(cluster, number):
    config = cluster.config(f"slot-{number}")
    async with await RedisStore.open(config, is_gone=lambda _: False) as store:
        await store.submit(order("r1"))
        [lease] = await store.claim("a", limit=1, lease_seconds=10)
        assert await store.finish(lease, "a", completed(lease))
        assert (await store.wait_for_result("r1")).state is S.COMPLETED
    assert cluster.owner(config).do("EXISTS", f"{config.root}:r:r1") == 1


async def test_a_store_follows_its_slot(cluster):
    config = cluster.config("moved")
    async with await RedisStore.open(config, is_gone=lambda _: False) as store:
        await store.submit(order("r1"))
        [lease] = await store.claim("a", limit=2, lease_seconds=100)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.wait_for_result, "r1")
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(cluster.move, config)
            assert await persistently(lambda: store.finish(lease, "a", completed(lease)))
        await store.submit(order("r2"))
        with anyio.fail_after(20):
            await store.wait_for_work()
        assert len(await store.claim("a", limit=1, lease_seconds=10)) == 1
        assert await store.counts() == {S.COMPLETED: 1, S.QUEUED: 1}


async def test_nothing_is_changed_while_the_slot_moves(cluster):
    config = cluster.config("moving")
    async with await RedisStore.open(config, is_gone=lambda _: False) as store:
        await store.submit(order("r0"))
        answers: list[str] = []
        moved = anyio.Event()

        async def work() -> None:
            number = 0
            while not moved.is_set() or number < 20:
                number += 1
                rollout_id = f"s{number}"
                await persistently(lambda rollout_id=rollout_id: store.submit(order(rollout_id)))
                answers.append(rollout_id)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await anyio.to_thread.run_sync(cluster.move, config)
            moved.set()
        assert await store.counts() == {S.QUEUED: len(answers) + 1}


@pytest.mark.slow(seconds=40)
async def test_a_failover_of_its_node_loses_nothing_that_was_acknowledged():
    with redis_cluster(replicas=True) as cluster:
        config = cluster.config("failover", replicas=1)
        async with await RedisStore.open(config, is_gone=lambda _: False) as store:
            for number in range(3):
                await store.submit(order(f"r{number}"))
            [lease] = await store.claim("a", limit=1, lease_seconds=100)
            rewinds = store.rewinds
            cluster.owner(config).kill()
            assert await persistently(store.counts) == {S.QUEUED: 3}
            assert store.rewinds > rewinds
            assert await store.held("a") == {lease.rollout_id: lease.token}
