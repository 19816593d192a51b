"""Registering a vLLM server names what it lacks, and what it cannot do is refused by name."""

import anyio
import pytest

from api_schemas.inference import BackendState
from rollout_service.engines.contract import RequestedExtras
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    ExtraUnsupported,
    PromptTooLong,
)
from rollout_service.engines.pool.pools import Pools
from rollout_service.testing import Fault, ScriptedEngine, ScriptedVllm
from tests.support.engines.pools import OPTIONS, SCRIPT, is_exact, request, running

pytestmark = pytest.mark.anyio


async def test_the_engine_is_asked_what_it_is():
    async with running(ScriptedVllm(SCRIPT), ScriptedEngine(SCRIPT)) as (_, pool):
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
    async with running(ScriptedVllm(SCRIPT, development=False)) as (_, pool):
        assert is_exact(await pool.generate(request()))
        outcome = await pool.update_weights("anywhere", 3)
        assert not outcome.outcomes[0].ok
        assert "does not accept commands to pause or to load weights" in outcome.outcomes[0].error


async def test_a_budget_that_vllm_would_cut_in_silence_is_refused():
    async with running(ScriptedVllm(SCRIPT, context_length=20)) as (_, pool):
        with pytest.raises(PromptTooLong):
            await pool.generate(request(budget=18))


async def test_a_sampling_whose_logprobs_it_does_not_have_is_refused():
    async with running(ScriptedVllm(SCRIPT, logprobs_mode="raw_logprobs")) as (_, pool):
        assert is_exact(await pool.generate(request(top_p=0.9)))
        with pytest.raises(BackendRejected, match=r"at temperature 1, instead of 0\.5"):
            await pool.generate(request(temperature=0.5))


async def test_a_server_that_came_back_with_another_logprobs_mode_is_not_taken_for_the_one_before():
    engine = ScriptedVllm(SCRIPT)
    async with running(engine) as (pools, pool):
        assert is_exact(await pool.generate(request(temperature=0.5)))
        engine._logprobs_mode = "raw_logprobs"
        await pools.register(engine.url)
        with pytest.raises(BackendRejected, match=r"at temperature 1, instead of 0\.5"):
            await pool.generate(request(temperature=0.5))


async def test_stale_gauges_after_an_abort_are_ignored():
    engine = ScriptedVllm(SCRIPT)
    async with running(engine) as (_, pool):
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
    async with running(engine) as (_, pool):
        extras = RequestedExtras(top_logprobs=2, prompt_logprobs_from=0)
        assert len((await pool.generate(request(extras=extras))).extras.top_logprobs) == 12
        engine.inject(Fault.SHORT_EXTRAS)
        assert len((await pool.generate(request(extras=extras))).extras.prompt_logprobs) == 3
        with pytest.raises(ExtraUnsupported, match="routed_experts"):
            await pool.generate(request(extras=RequestedExtras(routed_experts_from=0)))
        assert pool.views()[0].state is BackendState.READY
