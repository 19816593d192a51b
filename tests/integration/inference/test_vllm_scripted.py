"""Registering a vLLM server names what it lacks; its failures send requests elsewhere or raise typed errors."""

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from api_schemas.inference import BackendState, PauseMode
from rollout_service.engines.contract import (
    GenerateRequest,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    ExtraUnsupported,
    PromptTooLong,
)
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import Counting, Fault, ScriptedEngine, ScriptedVllm

pytestmark = pytest.mark.anyio

SCRIPT = Counting(512)
OPTIONS = PoolOptions(hold_seconds=5, probe_interval=0.05, healthy_after=1, slow_start=0.0)


def request(budget=12, prompt=(1, 2, 3), extras=None, **sampling):
    settings = SamplingOptions(max_new_tokens=budget, **sampling)
    return GenerateRequest(new_request_id(), prompt, settings, extras or RequestedExtras())


def is_exact(generation, budget=12, prompt=3):
    return generation.output_ids == [SCRIPT.token_at(prompt + i) for i in range(budget)]


@asynccontextmanager
async def running(*engines, options=OPTIONS):
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        pools = await stack.enter_async_context(Pools(options))
        for engine in engines:
            await pools.register(engine.url)
        yield pools["policy"]


async def test_the_engine_is_asked_what_it_is():
    async with running(ScriptedVllm(SCRIPT), ScriptedEngine(SCRIPT)) as pool:
        assert [view.kind for view in pool.views()] == ["vllm", "sglang"]
        assert pool.views()[0].exports == ["prompt_logprobs", "top_logprobs"]


@pytest.mark.parametrize(
    ("lacks", "error", "named"),
    [
        ({"scale_out": False}, BackendRejected, "--enable-scale-out"),
        ({"cached_details": False}, BackendProtocolError, "--enable-prompt-tokens-details"),
        ({"logprobs_mode": "raw_logits"}, BackendProtocolError, "--logprobs-mode"),
    ],
)
async def test_a_missing_server_option_is_named_at_registration(lacks, error, named):
    async with ScriptedVllm(SCRIPT, **lacks) as engine, Pools(OPTIONS) as pools:
        with pytest.raises(error) as caught:
            await pools.register(engine.url)
        assert named in f"{caught.value} {caught.value.hint}"


async def test_an_sglang_server_registered_as_vllm_is_detected():
    async with ScriptedEngine(SCRIPT) as engine, Pools(OPTIONS) as pools:
        with pytest.raises(BackendProtocolError, match="does not serve /inference/v1/generate"):
            await pools.register(engine.url, kind="vllm")


async def test_without_its_development_routes_a_server_serves_and_refuses_orders():
    async with running(ScriptedVllm(SCRIPT, development=False)) as pool:
        assert is_exact(await pool.generate(request()))
        outcome = await pool.update_weights("anywhere", 3)
        assert not outcome.outcomes[0].ok
        assert "does not accept commands to pause or to load weights" in outcome.outcomes[0].error


@pytest.mark.parametrize(
    "fault",
    [
        Fault.DROP,
        Fault.ERROR,
        Fault.GARBAGE,
        Fault.NO_LOGPROBS,
        Fault.SHORT_LOGPROBS,
        Fault.BAD_LOGPROB,
        Fault.BAD_ID,
    ],
)
@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedEngine])
async def test_failed_requests_go_elsewhere(kind, fault):
    engines = [kind(SCRIPT), kind(SCRIPT)]
    async with running(*engines) as pool:
        for engine in engines:
            engine.inject(fault)
        for _ in range(4):
            assert is_exact(await pool.generate(request()))


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedEngine])
@pytest.mark.parametrize("fault", [Fault.NO_LOGPROBS, Fault.SHORT_LOGPROBS, Fault.BAD_LOGPROB, Fault.BAD_ID])
async def test_a_server_that_never_gives_logprobs_fails_typed(kind, fault):
    engine = kind(SCRIPT)
    async with running(engine, options=replace(OPTIONS, unhealthy_after=100)) as pool:
        engine.inject(fault, count=50)
        with pytest.raises((BackendProtocolError, BackendUnreachable)):
            await pool.generate(request())


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedEngine])
async def test_an_id_outside_the_vocabulary_is_never_sent(kind, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    engine = kind(SCRIPT, model_path=tmp_path)
    async with running(engine) as pool:
        before = engine.requests
        for wrong in (512, -1):
            with pytest.raises(BackendRejected, match=f"prompt id {wrong} at 1 is outside"):
                await pool.generate(request(prompt=(1, wrong, 3)))
        assert engine.requests == before
        assert pool.views()[0].state is BackendState.READY


async def test_a_budget_that_vllm_would_cut_in_silence_is_refused():
    async with running(ScriptedVllm(SCRIPT, context_length=20)) as pool:
        with pytest.raises(PromptTooLong):
            await pool.generate(request(budget=18))


async def test_a_sampling_whose_logprobs_it_does_not_have_is_refused():
    async with running(ScriptedVllm(SCRIPT, logprobs_mode="raw_logprobs")) as pool:
        assert is_exact(await pool.generate(request(top_p=0.9)))
        with pytest.raises(BackendRejected, match=r"at temperature 1, instead of 0\.5"):
            await pool.generate(request(temperature=0.5))


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_no_generation_spans_an_update_without_saying_where(mode, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    engines = [ScriptedVllm(SCRIPT, latency=0.4), ScriptedVllm(SCRIPT, latency=0.4)]
    results = []
    async with running(*engines) as pool:

        async def generate():
            results.append(await pool.generate(request(budget=60)))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(generate)
            while sum(engine.in_flight for engine in engines) < 4:
                await anyio.sleep(0.01)
            await anyio.sleep(0.1)
            outcome = await pool.update_weights(str(tmp_path), 5, mode)
            assert all(each.ok for each in outcome.outcomes)
    for result in results:
        assert is_exact(result, budget=60)
        assert set(result.versions) == {0, 5}
        assert result.versions == sorted(result.versions)


async def test_a_cancelled_call_ends_in_the_engine():
    engine = ScriptedVllm(SCRIPT, latency=30)
    async with engine, Pools(OPTIONS) as pools:
        engine.latency = 0
        await pools.register(engine.url)
        engine.latency = 30
        with anyio.move_on_after(0.2):
            await pools["policy"].generate(request())
        with anyio.fail_after(1):
            while engine.in_flight:
                await anyio.sleep(0.01)
        assert len(engine.aborts) == 1


async def test_stale_gauges_after_an_abort_are_ignored():
    engine = ScriptedVllm(SCRIPT)
    async with running(engine) as pool:
        engine.latency = 30
        backend = pool._registry[pool.views()[0].backend_id].backend
        with anyio.move_on_after(0.1):
            await pool.generate(request())
        await backend.load()
        assert (await backend.load()).running == 0
        backend._open_calls += 1  # as if the next request were under way
        assert (await backend.load()).running == 0
        backend._open_calls -= 1


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedEngine])
async def test_an_export_that_is_left_out_or_short_is_typed(kind):
    engine = kind(SCRIPT)
    async with running(engine) as pool:
        extras = RequestedExtras(top_logprobs=2, prompt_logprobs_from=0)
        assert len((await pool.generate(request(extras=extras))).extras.top_logprobs) == 12
        engine.inject(Fault.SHORT_EXTRAS)
        assert len((await pool.generate(request(extras=extras))).extras.prompt_logprobs) == 3
        with pytest.raises(ExtraUnsupported, match="routed_experts"):
            await pool.generate(request(extras=RequestedExtras(routed_experts_from=0)))
        assert pool.views()[0].state is BackendState.READY
