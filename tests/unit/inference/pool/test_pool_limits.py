"""The limits of a pool and its backends are never exceeded, nobody is overtaken, and pools are independent."""

from collections import Counter

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.errors import InferenceError
from rollout_service.engines.pool.dispatch import WaitQueue
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.routing.contract import Observer
from rollout_service.settings import PoolSettings
from rollout_service.testing import Counting, ScriptedEngine
from tests.support.engines.pools import request, running
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Peak(ScriptedEngine):
    """Records the most requests it had at once."""

    peak = 0

    async def _run(self, *args):
        self.peak = max(self.peak, self.in_flight + 1)
        return await super()._run(*args)


async def test_a_pool_never_works_on_more_requests_than_its_limit():
    engines = [Peak(Counting(), latency=0.02), Peak(Counting(), latency=0.02)]
    async with running(*engines, options=PoolOptions(max_in_flight=3)) as (_, pool):
        seen = []

        async def generate(number):
            await pool.generate(request(), affinity=f"r{number}")
            seen.append(sum(view.in_flight for view in pool.views()))

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(generate, number)
            await until(lambda: pool.waiting == 17)
        assert len(seen) == 20
        assert max(seen) <= 3
        assert sum(engine.peak for engine in engines) <= 4  # one each at the registration
        assert pool.waiting == 0


async def test_a_backend_is_never_given_more_than_its_own_limit():
    small, large = Peak(Counting(), latency=0.02), Peak(Counting(), latency=0.02)
    options = PoolOptions(max_in_flight_per_backend=4)
    async with running(small, large, limits=[1, None], options=options) as (_, pool):
        async with anyio.create_task_group() as tasks:
            for _ in range(24):
                tasks.start_soon(pool.generate, request())
        assert (small.peak, large.peak) == (1, 4)


async def test_the_oldest_rollout_is_next():
    engine = ScriptedEngine(Counting())
    async with running(engine, options=PoolOptions(max_in_flight=1)) as (_, pool):
        engine.latency = 0.1
        order = []

        async def generate(name):
            await pool.generate(request(), affinity=name)
            order.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, "first")
            await until(lambda: engine.in_flight)
            for number, name in enumerate(["second", "third", "first"]):
                tasks.start_soon(generate, name)
                await until(lambda number=number: pool.waiting > number)
        assert order == ["first", "first", "second", "third"]
        pool.release("first")


async def test_everyone_in_the_queue_waits_for_a_pause_only_so_long():
    engine = ScriptedEngine(Counting())
    async with running(engine, options=PoolOptions(max_in_flight=1, hold_seconds=0.3)) as (_, pool):
        engine.latency = 30.0
        errors = []

        async def generate():
            try:
                await pool.generate(request())
            except InferenceError as error:
                errors.append(error)

        with anyio.fail_after(3):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(generate)
                await until(lambda: pool.waiting == 19)
                await pool.pause()
        assert len(errors) == 20
        assert pool.waiting == 0


async def test_a_backend_that_joins_takes_from_the_queue_at_once():
    first, second = ScriptedEngine(Counting()), ScriptedEngine(Counting())
    options = PoolOptions(max_in_flight_per_backend=1)
    async with second, running(first, options=options) as (pools, pool), anyio.create_task_group() as tasks:
        first.latency = 30.0
        tasks.start_soon(pool.generate, request())
        await until(lambda: first.in_flight)
        tasks.start_soon(pool.generate, request())
        await until(lambda: pool.waiting)
        await pools.register(second.url)
        await until(lambda: second.requests == 2)
        tasks.cancel_scope.cancel()


async def test_pools_have_their_own_backends_versions_limits_and_pauses():
    policy, judge = Peak(Counting(), latency=0.02), Peak(Counting(), latency=0.02)
    async with policy, judge, Pools(options_of={"judge": PoolOptions(max_in_flight=1)}) as pools:
        await pools.register(policy.url)
        await pools.register(judge.url, "judge")
        await pools["policy"].pause()
        await pools["judge"].generate(request())
        await pools["policy"].resume()
        await pools["policy"].update_weights("/weights/3", 3)
        async with anyio.create_task_group() as tasks:
            for name in ["policy", "judge"] * 5:
                tasks.start_soon(pools[name].generate, request())
        assert pools.names() == ["judge", "policy"]
        assert Counter(view.pool for view in pools.views()) == {"judge": 1, "policy": 1}
        assert {view.pool: view.weight_version for view in pools.views()} == {"judge": 0, "policy": 3}
        assert (policy.peak, judge.peak) == (5, 1)


@given(ages=st.lists(st.integers(0, 5), max_size=20), leavers=st.sets(st.integers(0, 19)))
def test_the_queue_lets_the_oldest_go_first_whoever_leaves(ages, leavers):
    queue = WaitQueue()
    waiting = {}
    for number, age in enumerate(ages):
        context = queue.join(age)
        waiting[number] = (context, context.__enter__())
    for number in leavers & waiting.keys():
        waiting.pop(number)[0].__exit__(None, None, None)
    order = []
    while waiting:
        number = next(number for number, (_, waiter) in waiting.items() if queue.is_next(waiter))
        order.append((ages[number], number))
        waiting.pop(number)[0].__exit__(None, None, None)
    assert order == sorted(order)
    assert not queue


def test_the_arrival_of_a_rollout_is_that_of_its_first_request():
    queue = WaitQueue()
    first, second = queue.arrival("a"), queue.arrival("b")
    assert first < second < queue.arrival(None)
    assert queue.arrival("a") == first
    queue.release("a")
    queue.release("a")
    assert queue.arrival("a") > second


async def test_a_pool_uses_the_router_that_its_options_name():
    decisions = {}

    class Recorder(Observer):
        def decided(self, pool, decision):
            decisions[pool] = decision

    options_of = {"counted": PoolOptions(router="least_loaded")}
    async with (
        ScriptedEngine(Counting()) as engine,
        Pools(options_of=options_of) as pools,
    ):
        pools.observe(Recorder())
        for pool in ("policy", "counted"):
            await pools.register(engine.url, pool)
            await pools[pool].generate(request())
    assert len(decisions["policy"].costs) == 1, "the cost router says what it expected"
    assert decisions["counted"].costs == ()


def test_the_settings_of_a_pool_are_its_options():
    assert PoolOptions(**PoolSettings().model_dump()) == PoolOptions()
    assert PoolOptions(**PoolSettings(router="least_loaded").model_dump()).router == "least_loaded"
