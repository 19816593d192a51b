"""Calls that get nowhere move to another backend; those that are only slow do not."""

from dataclasses import replace

import anyio
import pytest

from api_schemas.inference import BackendState, PauseMode
from api_schemas.trajectories import FinishReason
from rollout_service.engines.errors import BackendRejected
from rollout_service.engines.pool.locality import is_local
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import Counting, Fault, Hardware, ScriptedEngine
from tests.support.engines.pools import request
from tests.support.waiting import collect, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OPTIONS = PoolOptions(load_interval=0.02, stall_seconds=0.2, probe_interval=30.0, probe_timeout=5.0)


async def broken(*_: object, **__: object) -> None:
    raise ValueError("a defect")


async def test_a_request_that_an_engine_swallows_goes_elsewhere_though_the_engine_is_healthy():
    sick, good = ScriptedEngine(Counting()), ScriptedEngine(Counting())
    async with sick, good, Pools(OPTIONS) as pools:
        await pools.register(sick.url)
        sick.inject(Fault.HANG)
        answers = []
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect, answers, lambda: pools["policy"].generate(request(), affinity="r"))
                await until(lambda: sick.requests == 2)
                await pools.register(good.url)
        assert answers[0].finish_reason is FinishReason.LENGTH
        assert answers[0].backend_id.endswith(good.url.rpartition(":")[2])
        assert sick.aborts != []
        assert "no progress" in pools.views()[0].last_error


async def test_an_engine_that_answers_no_probe_is_said_to_hang():
    options = PoolOptions(probe_interval=0.02, probe_timeout=0.1)
    async with ScriptedEngine(Counting()) as engine, Pools(options) as pools:
        await pools.register(engine.url)
        engine._routes["/health"] = lambda _: anyio.sleep_forever()
        await until(lambda: "no answer to a probe in 0.1 s" in (pools.views()[0].last_error or ""))


async def test_a_defect_of_an_engines_kind_takes_that_engine_out_of_service_alone(monkeypatch):
    options = PoolOptions(load_interval=0.02, probe_interval=0.02, probe_timeout=5.0)
    async with ScriptedEngine(Counting()) as sick, ScriptedEngine(Counting()) as good, Pools(options) as pools:
        await pools.register(sick.url)
        await pools.register(good.url)
        handle = next(one for one in pools["policy"]._registry if one.backend.url == sick.url)
        monkeypatch.setattr(handle.backend, "load", broken)
        monkeypatch.setattr(handle.backend, "health", broken)
        await until(lambda: handle.state is BackendState.FAILED)
        assert "ValueError: a defect" in (handle.last_error or "")
        monkeypatch.undo()
        monkeypatch.setattr(handle.backend, "model_info", broken)
        failures = handle.failures
        await until(lambda: handle.failures > failures)
        monkeypatch.undo()
        await until(lambda: handle.state is BackendState.READY)
        monkeypatch.setattr(handle.backend, "update_weights", broken)
        outcome = await pools["policy"].update_weights("/w/1", 1)
        assert [each.ok for each in outcome.outcomes] == [False, True]
        assert not sick.paused


async def test_an_engine_that_works_for_long_is_left_alone():
    hardware = Hardware(prefill_seconds=0.0, decode_seconds=0.06)
    async with ScriptedEngine(Counting(), hardware=hardware) as engine, Pools(OPTIONS) as pools:
        await pools.register(engine.url)
        before = engine.requests
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pools["policy"].generate, request(budget=16))
            for _ in range(8):  # others come and go: the engine is alive
                tasks.start_soon(pools["policy"].generate, request(budget=1))
                await anyio.sleep(0.1)
        assert engine.requests == before + 9
        assert pools.views()[0].failures == 0


async def test_an_engine_that_streams_is_left_alone_whatever_it_reports():
    options = replace(OPTIONS, stall_seconds=0.6)
    async with ScriptedEngine(Counting(), latency=1.5) as engine, Pools(options) as pools:
        await pools.register(engine.url)
        before, chunks = engine.requests, []
        with anyio.fail_after(20):
            answer = await pools["policy"].generate(request(budget=40), on_tokens=chunks.append)
        assert engine.requests == before + 1
        assert [token for chunk in chunks for token in chunk.ids] == answer.output_ids
        assert pools.views()[0].failures == 0


async def test_a_pause_is_not_a_stall():
    engine = ScriptedEngine(Counting(), latency=0.1)
    async with engine, Pools(OPTIONS) as pools:
        await pools.register(engine.url)
        pool = pools["policy"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.generate, request())
            await until(lambda: engine.in_flight)
            await pool.pause(PauseMode.IN_PLACE)
            await anyio.sleep(0.4)
            await pool.resume()
        assert pools.views()[0].failures == 0


async def test_an_engine_that_reports_no_load_is_not_judged():
    engine = ScriptedEngine(Counting())
    del engine._routes["/v1/loads"]
    async with engine, Pools(OPTIONS) as pools:
        await pools.register(engine.url)
        engine.latency = 0.5
        await pools["policy"].generate(request())
        assert pools.views()[0].failures == 0


@pytest.mark.parametrize("defect", [BackendRejected("answered 404"), ValueError("a defect")], ids=["4xx", "plug-in"])
async def test_an_engine_that_reports_again_is_judged_again(monkeypatch, defect):
    async with ScriptedEngine(Counting()) as engine, Pools(OPTIONS) as pools:
        await pools.register(engine.url)
        [handle] = pools["policy"]._registry
        asked, ask = [], handle.backend.load

        async def load():
            asked.append(None)
            if len(asked) == 1:
                raise defect
            return await ask()

        monkeypatch.setattr(handle.backend, "load", load)
        await until(lambda: len(asked) > 2)
        monkeypatch.undo()


def test_this_node_is_known_by_its_names_and_addresses():
    assert is_local("http://localhost:1")
    assert is_local("http://127.0.0.1:30000")
    assert not is_local("http://192.0.2.7:30000")
    assert not is_local("nonsense")
