"""A pool streams every token once, whatever happens to its engines in the middle of an answer."""

import time
from dataclasses import replace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import RequestedExtras
from rollout_service.engines.errors import BackendProtocolError, BackendUnreachable
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import AfterTokens, Fault, Reply, ScriptedEngine, ScriptedVllm
from tests.support.engines.pools import OPTIONS, SCRIPT, is_exact, request, running, weights_in
from tests.support.waiting import collect, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

KINDS = [ScriptedEngine, ScriptedVllm]
BREAKS = [
    Fault.DROP,
    Fault.DIE,
    Fault.ERROR,
    Fault.GARBAGE,
    Fault.CUT,
    Fault.QUEUE_ABORT,
    Fault.NO_LOGPROBS,
    Fault.SHORT_LOGPROBS,
    Fault.BAD_ID,
    Fault.BAD_LOGPROB,
]
PATIENT = replace(OPTIONS, max_failures=30, unhealthy_after=100, probe_interval=60.0)
kinds = pytest.mark.parametrize("kind", KINDS, ids=["sglang", "vllm"])


class Sink:
    """Collects what is streamed."""

    def __init__(self):
        self.chunks = []

    def __call__(self, chunk):
        assert len(chunk.ids) == len(chunk.logprobs) >= 1
        self.chunks.append(chunk)

    @property
    def ids(self):
        return [id_ for chunk in self.chunks for id_ in chunk.ids]


class Short:
    """A script of one answer that stops."""

    IDS = [7, 8, 9]

    def reply(self, input_ids, budget):
        return Reply(self.IDS)


@kinds
@pytest.mark.parametrize("after", [0, 1, 5, 11])
@pytest.mark.parametrize("fault", BREAKS)
async def test_what_was_streamed_is_kept_when_an_answer_breaks_off(kind, fault, after):
    engines = [kind(SCRIPT, latency=0.02), kind(SCRIPT, latency=0.02)]
    sink = Sink()
    async with running(*engines, options=PATIENT) as (_, pool):
        for engine in engines[:1] if fault is Fault.DIE else engines:
            engine.inject(AfterTokens(after, fault))
        whole = await pool.generate(request(12), on_tokens=sink)
    assert is_exact(whole)
    assert sink.ids == whole.output_ids
    assert set(whole.versions) == {0}


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=3),
    faults=st.lists(
        st.none()
        | st.builds(
            AfterTokens,
            st.integers(0, 30),
            st.sampled_from([fault for fault in BREAKS if fault is not Fault.DIE]),
        ),
        max_size=8,
    ),
    budget=st.integers(1, 30),
    incremental=st.booleans(),
    latency=st.sampled_from([0.0, 0.01]),
)
async def test_no_chain_of_faults_loses_or_repeats_a_token(kinds, faults, budget, incremental, latency):
    engines = [
        kind(SCRIPT, latency=latency, incremental=incremental) if kind is ScriptedEngine else kind(SCRIPT)
        for kind in kinds
    ]
    sink = Sink()
    extras = RequestedExtras(top_logprobs=2)
    async with running(*engines, options=PATIENT) as (_, pool):
        for number, fault in enumerate(faults):
            if fault is not None:
                engines[number % len(engines)].inject(fault)
        whole = await pool.generate(request(budget, extras=extras), on_tokens=sink)
    assert is_exact(whole, budget)
    assert sink.ids == whole.output_ids
    assert [row[0].token_id for row in whole.extras.top_logprobs] == whole.output_ids


@kinds
async def test_an_engine_that_stalls_in_the_middle_is_left(kind):
    options = replace(OPTIONS, stall_seconds=0.3, load_interval=0.05, probe_interval=60.0)
    engine, other = kind(SCRIPT), kind(SCRIPT)
    sink = Sink()
    async with running(engine, other, options=options) as (_, pool):
        engine.inject(AfterTokens(4, Fault.HANG))
        other.inject(AfterTokens(7, Fault.HANG))
        whole = await pool.generate(request(), on_tokens=sink)
    assert is_exact(whole)
    assert sink.ids == whole.output_ids


@kinds
async def test_a_removed_engine_s_stream_continues_elsewhere(kind):
    engine, other = kind(SCRIPT), kind(SCRIPT)
    sink = Sink()
    results = []
    async with running(engine) as (pools, pool):
        engine.latency = 5.0
        async with anyio.create_task_group() as tasks, other:
            tasks.start_soon(collect, results, lambda: pool.generate(request(60), on_tokens=sink))
            await until(lambda: len(sink.ids) >= 2)
            await pools.register(other.url)
            await pools.remove(next(view.backend_id for view in pool.views() if view.url == engine.url))
            await until(lambda: results)
    assert is_exact(results[0], 60)
    assert sink.ids == results[0].output_ids
    assert engine.aborts, "the request is not left behind in the engine"


@kinds
async def test_an_abort_after_the_last_token_is_too_late(kind):
    engine = kind(Short(), latency=0.05)
    async with running(engine) as (_, pool), anyio.create_task_group() as tasks:
        results = []
        tasks.start_soon(collect, results, lambda: pool.generate(request(100), on_tokens=Sink()))
        await until(lambda: engine.in_flight)
        asked = engine.requests
        time.sleep(0.1)  # noqa: ASYNC251 - the engine notices both at once, as on a busy machine
        engine._abort_turns("")
        await until(lambda: results)
    (whole,) = results
    assert (whole.finish_reason, list(whole.output_ids)) == (FinishReason.STOP, Short.IDS)
    assert engine.requests == asked


async def test_versions_that_nobody_knows_are_an_error_not_a_guess(tmp_path):
    """vLLM says at the end which weights sampled what; here it dies before, after a weight update."""
    engine = ScriptedVllm(SCRIPT)
    sink = Sink()
    errors = []
    async with running(engine, options=replace(OPTIONS, hold_seconds=1.0)) as (_, pool):
        engine.latency = 2.0

        async def generate():
            try:
                await pool.generate(request(600), on_tokens=sink)
            except BackendProtocolError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await until(lambda: sink.chunks)
            engine.latency = 0.0  # of the token that tries the weights
            await pool.update_weights(weights_in(tmp_path), 3, PauseMode.IN_PLACE)
            await engine.die()
    assert "versions of its tokens are unknown" in str(errors[0])


async def test_engines_that_all_break_before_their_first_token_are_an_error():
    engine = ScriptedEngine(SCRIPT)
    sink = Sink()
    options = PoolOptions(max_failures=2, unhealthy_after=100, probe_interval=60.0)
    async with running(engine, options=options) as (_, pool):
        engine.inject(AfterTokens(0, Fault.CUT), 2)
        with pytest.raises(BackendUnreachable, match="without saying why sampling ended"):
            await pool.generate(request(), on_tokens=sink)
    assert not sink.chunks


@kinds
async def test_prompt_logprobs_come_with_one_chunk(kind):
    sink = Sink()
    asked = request(extras=RequestedExtras(prompt_logprobs_from=1))
    async with running(kind(SCRIPT)) as (_, pool):
        whole = await pool.generate(asked, on_tokens=sink)
    assert is_exact(whole)
    assert len(whole.extras.prompt_logprobs) == 2
    assert [chunk.ids for chunk in sink.chunks] == [whole.output_ids]


@kinds
async def test_constrained_text_begins_anew_after_an_abort(kind):
    engine = kind(SCRIPT)
    sink = Sink()
    results = []
    asked = request(json_schema='{"type": "object"}')
    async with running(engine) as (_, pool):
        engine.latency = 0.4
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, results, lambda: pool.generate(asked, on_tokens=sink))
            await until(lambda: engine.in_flight)
            await anyio.sleep(0.1)
            await pool.abort()
    assert len(results[0].output_ids) == 12
    assert results[0].finish_reason is FinishReason.LENGTH
    assert [chunk.ids for chunk in sink.chunks] == [results[0].output_ids]
