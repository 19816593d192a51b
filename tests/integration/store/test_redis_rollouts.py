"""Services that share rollouts in a Redis: each sees what the others do, and none takes what a live one holds."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from api_schemas.nodes import NodeState
from api_schemas.rollouts import RolloutState
from rollout_service.base.errors import StoreError
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.store.cluster_contract import NodeReport
from rollout_service.store.redis import RedisConfig, RedisStore
from tests.support.redis_server import redis_server
from tests.support.store.rollouts import completed, order
from tests.support.store.servers import redis_store
from tests.support.waiting import until

pytestmark = pytest.mark.redis


async def test_what_one_service_does_wakes_the_others(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as one, redis_store(config) as other:
        assert await other.claim("b", limit=1, lease_seconds=10) == []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.wait_for_work)
                await one.submit(order("r1"))
            [lease] = await other.claim("b", limit=1, lease_seconds=10)
            await other.cancel_requested("b")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.wait_for_cancels)
                await one.cancel("r1")
            assert await other.cancel_requested("b") == ["r1"]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.wait_for_result, "r1")
                await anyio.wait_all_tasks_blocked()
                assert await other.finish(lease, "b", completed(lease))


async def test_a_rollout_that_had_not_begun_and_is_given_back_wakes_the_others(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as one, redis_store(config) as other:
        await one.submit(order("r1"))
        await one.claim("a", limit=1, lease_seconds=1_000)
        assert await other.claim("b", limit=1, lease_seconds=1_000) == []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.wait_for_work)
                await one.release("a")
        assert len(await other.claim("b", limit=1, lease_seconds=10)) == 1


class Waiting:
    """Services that wait for work, and who of them was woken."""

    def __init__(self, stores: Sequence[RedisStore]) -> None:
        self.stores = stores
        self.began: list[int] = []
        self.woken: list[int] = []

    async def wait(self, number: int) -> None:
        assert await self.stores[number].claim(f"owner-{number}", limit=1, lease_seconds=1_000) == []
        self.began.append(number)
        await self.stores[number].wait_for_work()
        self.woken.append(number)


@asynccontextmanager
async def waiting(config: RedisConfig, count: int) -> AsyncIterator[Waiting]:
    """Let so many services wait for work during the block."""
    async with AsyncExitStack() as stack:
        found = Waiting([await stack.enter_async_context(redis_store(config)) for _ in range(count)])
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(found.wait, number)
            await until(lambda: len(found.began) == count)
            yield found
            tasks.cancel_scope.cancel()


async def test_a_rollout_wakes_one_of_those_who_wait(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as trainer, waiting(config, 4) as services:
        for number in range(1, 5):
            await trainer.submit(order(f"r{number}"))
            await until(lambda number=number: len(services.woken) == number)
            await anyio.sleep(0.05)  # time for another to be woken, which would be wrong
            assert len(set(services.woken)) == number


async def test_who_was_woken_and_claims_nothing_is_followed_by_another(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as trainer:
        await trainer.cluster.join(NodeReport("n1", "trainer"))
    async with redis_store(config) as trainer, waiting(config, 2) as services:
        await trainer.submit(order("r1"))
        await until(lambda: len(services.woken) == 1)

        async def passed_on() -> bool:
            await trainer.cluster.heartbeat(NodeReport("n1", "trainer"))
            return len(services.woken) == 2

        await until(passed_on)


async def test_a_claim_that_leaves_rollouts_wakes_another_for_them(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as trainer, waiting(config, 3) as services:
        await trainer.submit(order("r1"))
        await until(lambda: len(services.woken) == 1)
        await trainer.submit(order("r2"))
        await until(lambda: len(services.woken) == 2)
        first = services.woken[0]
        # Of both it takes one, and the other is offered to whoever waits still.
        assert len(await services.stores[first].claim(f"owner-{first}", limit=1, lease_seconds=10)) == 1
        await until(lambda: len(services.woken) == 3)


async def test_who_has_ended_is_passed_over(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as trainer, redis_store(config) as live:
        async with redis_store(config) as gone:
            assert await gone.claim("gone", limit=1, lease_seconds=1_000) == []
        assert await live.claim("live", limit=1, lease_seconds=1_000) == []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(live.wait_for_work)
                await anyio.wait_all_tasks_blocked()
                await trainer.submit(order("r1"))


async def test_many_claims_at_once_share_no_rollout(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as one, redis_store(config) as other:
        for number in range(200):
            await one.submit(order(f"r{number}"))
        taken: list[str] = []

        async def work(store: RedisStore, owner: str) -> None:
            while leases := await store.claim(owner, limit=3, lease_seconds=10):
                taken.extend(lease.rollout_id for lease in leases)

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(work, one, f"a{number}")
                tasks.start_soon(work, other, f"b{number}")
        assert len(taken) == len(set(taken)) == 200


async def test_the_work_of_a_live_service_is_not_recovered(shared_redis):
    live, mine = str(ServiceIdentity.create()), str(ServiceIdentity.create())
    async with redis_store(shared_redis.config()) as store:
        await store.submit(order("r1"))
        assert await store.claim(live, limit=1, lease_seconds=10)
        assert await store.recover(mine) == 0
        assert await store.claim(mine, limit=1, lease_seconds=10) == []


async def test_a_service_that_leaves_hands_its_rollouts_on(shared_redis):
    async with redis_store(shared_redis.config()) as store:
        await store.submit(order("r1"))
        await store.cluster.join(NodeReport("n1", "a"))
        [lease] = await store.claim("a", limit=1, lease_seconds=1_000)
        await store.advance(lease, "a", RolloutState.INIT)
        await store.cluster.leave("a")
        [again] = await store.claim("b", limit=1, lease_seconds=10)
        assert again.attempt == 1, "an orderly end counts no attempt"
        assert not await store.finish(lease, "a", completed(lease))


async def test_a_node_gets_nothing_from_the_moment_at_which_it_is_told_to_drain(shared_redis):
    async with redis_store(shared_redis.config()) as store:
        await store.cluster.join(NodeReport("n1", "a"))
        await store.submit(order("r1"))
        await store.cluster.change_state("n1", NodeState.DRAINING)
        assert await store.claim("a", limit=1, lease_seconds=10) == []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.wait_for_work)
                await anyio.wait_all_tasks_blocked()
                await store.cluster.change_state("n1", NodeState.READY)
        assert len(await store.claim("a", limit=1, lease_seconds=10)) == 1


async def test_claims_whose_answers_were_lost_are_found_again():
    with redis_server() as server:
        async with redis_store(server.config(answer_seconds=2.5)) as store:
            for lost in (1, 2):
                await store.submit(order(f"r{lost}"))
                with server.paused(), pytest.raises(StoreError):
                    await store.claim("a", limit=9, lease_seconds=1_000)
                # Redis has the call, and takes the lease for an answer that nobody waits for.
                await until(lambda least=lost: server.do("SCARD", store.connection.key("held:1")) >= least, 20)
            server.kill()
            with pytest.raises(StoreError):
                await store.claim("a", limit=9, lease_seconds=1_000)
            server.start()
            leases = await store.claim("a", limit=9, lease_seconds=1_000)
            assert sorted(lease.rollout_id for lease in leases) == ["r1", "r2"]
            assert await store.claim("a", limit=9, lease_seconds=1_000) == []
            assert all([await store.finish(lease, "a", completed(lease)) for lease in leases])


async def test_a_lease_is_not_lost_with_a_damaged_record_that_cannot_be_settled(shared_redis, monkeypatch):
    async with redis_store(shared_redis.config()) as store:
        for name in ("r0", "r1"):
            await store.submit(order(name))
        shared_redis.do("SET", store.connection.key("q:r0"), "{")
        call, failures = store.connection.call, ["Redis is full"]

        async def fail_once(function, *arguments):
            if function == "rollouts_finish" and failures:
                raise StoreError(failures.pop())
            return await call(function, *arguments)

        monkeypatch.setattr(store.connection, "call", fail_once)
        with pytest.raises(StoreError):
            await store.claim("a", limit=2, lease_seconds=1_000)
        assert [lease.rollout_id for lease in await store.claim("a", limit=2, lease_seconds=1_000)] == ["r1"]
        assert await store.counts() == {RolloutState.FAILED: 1, RolloutState.QUEUED: 1}


@pytest.mark.parametrize("hours", [-30, 30])
async def test_the_clocks_of_the_nodes_do_not_matter(shared_redis, monkeypatch, hours):
    config, real = shared_redis.config(), time.time
    async with redis_store(config) as one, redis_store(config) as two:
        for name, store in (("n1", one), ("n2", two)):
            await store.cluster.join(NodeReport(name, name))
        await one.submit(order("r"))
        [lease] = await one.claim("n1", limit=1, lease_seconds=100)
        lead = await one.cluster.lead("runs", "n1")
        monkeypatch.setattr(time, "time", lambda: real() + hours * 3_600)
        assert await two.claim("n2", limit=1, lease_seconds=100) == []
        assert (await two.cluster.heartbeat(NodeReport("n2", "n2"))).dead == []
        assert await two.cluster.lead("runs", "n2") is None
        assert await two.delete_expired(3_600) == 0
        submitted, _ = await two.submit(order("s"))
        assert abs((submitted.created_at - lease.created_at).total_seconds()) < 600
        monkeypatch.undo()
        assert await one.cluster.lead("runs", "n1") == lead
        assert await one.renew("n1", ["r"], lease_seconds=100) == []
        assert [node.state for node in await one.cluster.nodes()] == [NodeState.READY] * 2
