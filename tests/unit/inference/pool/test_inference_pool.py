"""A pool loses no token, whatever faults its engines have; they are scripted, and reached over real HTTP."""

from collections import Counter
from dataclasses import replace
from functools import partial

import anyio
import pytest

from api_schemas.inference import BackendState, PauseMode
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    NoBackendError,
    PoolPaused,
    PromptTooLong,
    UnknownBackend,
)
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import Fault, ScriptedEngine, ScriptedVllm
from tests.support.engines.pools import OPTIONS, SCRIPT, is_exact, request, running, states, weights_in
from tests.support.waiting import collect, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MALFORMED = {
    Fault.NO_LOGPROBS: "is missing",
    Fault.SHORT_LOGPROBS: "has 11 entries",
    Fault.BAD_LOGPROB: "must be a finite number",
    Fault.BAD_ID: "token 512|vocabulary",
}
RETRIED = [Fault.DROP, Fault.ERROR, Fault.GARBAGE, Fault.QUEUE_ABORT, *MALFORMED]
kinds = pytest.mark.parametrize("kind", [ScriptedEngine, ScriptedVllm], ids=["sglang", "vllm"])


def state_of(pool, engine):
    return next(view for view in pool.views() if view.url == engine.url).state


# ---- choosing


async def test_a_rollouts_turns_go_to_one_backend():
    async with running(ScriptedEngine(SCRIPT), ScriptedEngine(SCRIPT)) as (_, pool):
        backends = {(await pool.generate(request(), affinity="r")).backend_id for _ in range(6)}
        assert len(backends) == 1


async def test_rollouts_are_spread_and_every_count_goes_down_again():
    engines = [ScriptedEngine(SCRIPT, latency=0.02) for _ in range(3)]
    async with running(*engines) as (_, pool):
        served = Counter()

        async def roll_out(name):
            for _ in range(2):
                served[(await pool.generate(request(), affinity=name)).backend_id] += 1
            pool.release(name)

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(roll_out, f"r{number}")
        assert sorted(served.values()) == [20, 20, 20]
        assert [view.in_flight for view in pool.views()] == [0, 0, 0]
        assert sum(view.served for view in pool.views()) == 60


# ---- failures


@kinds
@pytest.mark.parametrize("fault", RETRIED)
@pytest.mark.parametrize("count", [1, 2], ids=["a single backend", "two backends"])
async def test_a_fault_of_one_request_costs_no_token(kind, fault, count):
    engines = [kind(SCRIPT) for _ in range(count)]
    async with running(*engines) as (_, pool):
        for engine in engines:
            engine.inject(fault)
        assert is_exact(await pool.generate(request(), affinity="r"))
        assert [view.in_flight for view in pool.views()] == [0] * count


@kinds
@pytest.mark.parametrize(("fault", "message"), MALFORMED.items())
async def test_a_backend_that_fails_every_request_is_named_in_the_end(kind, fault, message):
    engine = kind(SCRIPT)
    async with running(engine, options=replace(OPTIONS, unhealthy_after=100)) as (_, pool):
        engine.inject(fault, count=100)
        with pytest.raises(BackendProtocolError, match=f"{engine.url.removeprefix('http://')}: .*{message}"):
            await pool.generate(request())
        assert pool.views()[0].failures >= OPTIONS.max_failures


async def test_a_request_that_fails_at_every_backend_takes_none_from_the_others(monkeypatch):
    engine = ScriptedEngine(SCRIPT, latency=0.3)
    async with running(engine) as (_, pool):
        [handle] = pool._registry
        sample, prompts = handle.backend.generate, []

        async def fail_one_prompt(asked, on_tokens=None):
            prompts.append(asked.input_ids)
            if asked.input_ids == (6, 6, 6):
                raise BackendUnreachable("/generate answered 500")
            return await sample(asked, on_tokens)

        monkeypatch.setattr(handle.backend, "generate", fail_one_prompt)
        answers = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, answers, partial(pool.generate, request()))
            with pytest.raises(BackendUnreachable, match="answered 500"):
                await pool.generate(request(prompt=(6, 6, 6)))
            assert states(pool) == [BackendState.READY]
        assert is_exact(answers[0])
        assert prompts.count((1, 2, 3)) == 1, "nobody else's request was repeated"
        monkeypatch.undo()


async def test_a_backend_that_answers_probes_but_fails_every_request_is_taken_out():
    engine = ScriptedVllm(SCRIPT)  # its probe samples nothing
    async with running(engine, options=replace(OPTIONS, hold_seconds=1.0)) as (_, pool):
        engine.inject(Fault.ERROR, count=100)
        with pytest.raises(NoBackendError):
            await pool.generate(request())
        assert states(pool) == [BackendState.FAILED]


async def test_only_probes_that_fail_in_a_row_take_a_backend_out():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine, options=replace(OPTIONS, probe_interval=60)) as (_, pool):
        [handle] = pool._registry
        for healthy, state in ((False, "ready"), (True, "ready"), (False, "ready"), (False, "failed")):
            engine.healthy = healthy
            await pool._health._probe(handle)
            assert states(pool) == [state]


async def test_the_requests_of_a_backend_that_was_taken_out_go_elsewhere_without_a_probe(monkeypatch):
    engines = [ScriptedEngine(SCRIPT, latency=0.5) for _ in range(2)]
    async with running(*engines, options=replace(OPTIONS, probe_interval=60, probe_timeout=60)) as (_, pool):

        async def hang(**_):
            await anyio.sleep_forever()

        for handle in pool._registry:
            monkeypatch.setattr(handle.backend, "health", hang)
        answers = []
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect, answers, partial(pool.generate, request()))
                [taken] = await until(lambda: [handle for handle in pool._registry if handle.in_flight])
                pool._registry.take_out(taken)
        assert is_exact(answers[0])
        assert answers[0].backend_id != taken.id


async def test_a_backend_that_is_back_has_no_error_any_more():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine) as (_, pool):
        engine.inject(Fault.NO_LOGPROBS, count=2)
        assert is_exact(await pool.generate(request()))
        [view] = pool.views()
        assert (view.state, view.last_error, view.failures) == (BackendState.READY, None, 2)
        assert view.failed_at is not None


async def test_a_backend_that_answers_probes_but_samples_nothing_stays_out_of_service():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine, options=replace(OPTIONS, hold_seconds=1.0)) as (_, pool):
        engine.inject(Fault.NO_LOGPROBS, count=100)
        with pytest.raises(NoBackendError, match="output_token_logprobs is missing"):
            await pool.generate(request())
        [view] = pool.views()
        assert view.state is BackendState.FAILED
        assert "cannot sample with version 0 of the weights" in view.last_error


async def test_endless_aborts_of_an_engine_that_nobody_paused_are_an_error():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine) as (_, pool):
        engine.inject(Fault.QUEUE_ABORT, count=100)
        with pytest.raises(BackendUnreachable, match="before there is a token"):
            await pool.generate(request())


async def test_endless_aborts_of_a_request_that_begins_anew_are_an_error_though_it_had_tokens():
    engine = ScriptedEngine(SCRIPT, latency=0.2)
    options = replace(OPTIONS, max_failures=2)
    async with running(engine, options=options) as (_, pool), anyio.create_task_group() as tasks:
        tasks.start_soon(abort_all, engine, pool)
        with pytest.raises(BackendUnreachable, match="before there is a token"), anyio.fail_after(5):
            await pool.generate(request(json_schema='{"type": "object"}'))
        tasks.cancel_scope.cancel()


async def abort_all(engine, pool):
    """Abort each request in the middle of its answer, until cancelled."""
    while True:
        seen = engine.requests
        await until(lambda: engine.requests != seen)  # noqa: B023 - awaited at once
        await anyio.sleep(0.05)
        await pool.abort()


async def test_what_pauses_abort_before_the_first_token_is_not_held_against_the_engine():
    engine = ScriptedEngine(SCRIPT, latency=0.5)
    async with running(engine, options=replace(OPTIONS, max_failures=2)) as (_, pool):
        answers = []
        async with anyio.create_task_group() as tasks:
            seen = engine.requests
            tasks.start_soon(collect, answers, lambda: pool.generate(request()))
            for number in range(4):
                await until(lambda: engine.requests != seen)  # noqa: B023 - awaited at once
                seen = engine.requests
                await pool.pause(PauseMode.ABORT)
                engine.inject(Fault.QUEUE_ABORT, count=int(number == 3))
                await pool.resume()
        assert is_exact(answers[0])


@kinds
@pytest.mark.parametrize("token", [-1, 512, 10**9])
async def test_an_id_outside_the_vocabulary_is_never_sent(kind, token, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    engine = kind(SCRIPT, model_path=tmp_path)
    async with running(engine) as (_, pool):
        before = engine.requests
        with pytest.raises(BackendRejected, match=f"prompt id {token} at 1 is outside"):
            await pool.generate(request(prompt=(1, token, 3)))
        assert engine.requests == before
        assert states(pool) == [BackendState.READY]


async def test_ids_of_earlier_turns_are_looked_at_again_only_after_another_vocabulary():
    engine, small = ScriptedEngine(SCRIPT), ScriptedEngine(SCRIPT, vocab_size=300)
    later = replace(request(prompt=(400, 2, 3)), known=2)
    async with running(engine) as (pools, pool), small:
        await pool.generate(later)
        with pytest.raises(BackendRejected, match="prompt id 512 at 2"):
            await pool.generate(replace(request(prompt=(1, 2, 512)), known=2))
        await pools.remove(pool.views()[0].backend_id)
        await pools.register(small.url)
        with pytest.raises(BackendRejected, match="prompt id 400 at 0"):
            await pool.generate(later)


async def test_a_request_that_does_not_fit_is_refused_before_it_is_sent():
    engine = ScriptedEngine(SCRIPT, context_length=50)
    async with running(engine) as (_, pool):
        before = engine.requests
        with pytest.raises(PromptTooLong):
            await pool.generate(request(budget=60))
        assert engine.requests == before
        assert pool.views()[0].state is BackendState.READY


async def test_requests_move_when_their_backend_dies():
    engines = [ScriptedEngine(SCRIPT, latency=0.3), ScriptedEngine(SCRIPT, latency=0.3)]
    async with running(*engines) as (_, pool):
        results = []
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(collect, results, partial(pool.generate, request(), affinity=f"r{number}"))
            await until(lambda: all(engine.in_flight for engine in engines))
            await engines[0].die()
        assert len(results) == 10
        assert all(is_exact(each) for each in results)
        assert {each.backend_id for each in results} == {f"policy@{engines[1].url.removeprefix('http://')}"}
        await until(lambda: state_of(pool, engines[0]) is BackendState.FAILED)


async def test_an_engine_that_restarts_with_another_vocabulary_stays_out():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine) as (_, pool):
        engine.healthy = False
        await until(lambda: state_of(pool, engine) is BackendState.FAILED)
        engine._vocab_size, engine.healthy = 1024, True
        await until(lambda: "vocabulary of 1024" in pool.views()[0].last_error)
        assert state_of(pool, engine) is BackendState.FAILED


async def test_requests_wait_for_a_backend_that_comes_back():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine) as (_, pool), anyio.create_task_group() as tasks:
        engine.healthy = False
        await until(lambda: state_of(pool, engine) is BackendState.FAILED)
        results = []
        tasks.start_soon(collect, results, lambda: pool.generate(request()))
        await anyio.wait_all_tasks_blocked()
        assert results == []
        engine.healthy = True
        await until(lambda: results)
        assert is_exact(results[0])


@kinds
async def test_cancelling_a_request_aborts_it_in_the_engine(kind):
    engine = kind(SCRIPT)
    async with running(engine) as (pools, pool):
        engine.latency = 30
        wanted = request()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.generate, wanted)
                await until(lambda: engine.in_flight)
                tasks.cancel_scope.cancel()
        await until(lambda: engine.in_flight == 0)
        assert [abort.startswith(f"{wanted.request_id}-0000") for abort in engine.aborts] == [True]
        assert pools.views()[0].in_flight == 0


# ---- pauses and weights


async def test_a_paused_pool_holds_requests():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine) as (_, pool):
        await pool.pause()
        assert states(pool) == [BackendState.PAUSED]
        before, results = engine.requests, []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, results, lambda: pool.generate(request()))
            await anyio.wait_all_tasks_blocked()
            assert (engine.requests, results) == (before, [])
            await pool.resume()
        assert is_exact(results[0])


async def test_a_request_that_a_pause_holds_for_too_long_may_be_sent_again_later():
    async with running(ScriptedEngine(SCRIPT), options=PoolOptions(hold_seconds=0.1)) as (_, pool):
        await pool.pause()
        with pytest.raises(PoolPaused, match="paused") as caught:
            await pool.generate(request())
        assert (caught.value.status, caught.value.retryable) == (503, True)


@kinds
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_update_loses_no_token_and_every_token_has_its_version(kind, streamed, mode, tmp_path):
    engine, chunks = kind(SCRIPT, latency=0.4), []
    async with running(engine) as (_, pool):
        results = []
        sink = chunks.append if streamed else None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, results, lambda: pool.generate(request(budget=60), on_tokens=sink))
            await until(lambda: chunks if streamed else engine.in_flight)
            outcome = await pool.update_weights(weights_in(tmp_path), 1, mode)
        assert [each.ok for each in outcome.outcomes] == [True]
        assert outcome.version == 1
        assert is_exact(results[0], budget=60)
        assert [token for chunk in chunks for token in chunk.ids] == (results[0].output_ids if streamed else [])
        assert results[0].versions == sorted(results[0].versions)
        assert set(results[0].versions) <= {0, 1}
        assert results[0].versions[-1] == (0 if mode is PauseMode.DRAIN else 1)
        assert pool.views()[0].weight_version == 1


async def test_a_backend_that_joins_late_gets_the_weights_and_the_pause():
    first, late = ScriptedEngine(SCRIPT), ScriptedEngine(SCRIPT)
    async with running(first) as (pools, pool), late:
        await pool.update_weights("/weights/3", 3)
        await pool.pause(PauseMode.IN_PLACE)
        view = await pools.register(late.url)
        assert (view.weight_version, late.version, late.paused) == (3, "3", True)
        await pool.resume()
        assert not late.paused


# ---- membership


async def test_an_empty_pool_says_how_to_register():
    async with Pools(OPTIONS) as pools:
        with pytest.raises(NoBackendError) as caught:
            pools["policy"]
        assert "POST /v1/backends" in caught.value.hint


async def test_registering_twice_changes_nothing():
    engine = ScriptedEngine(SCRIPT)
    async with running(engine) as (pools, pool):
        await pools.register(f"{engine.url}/")
        assert len(pool.views()) == 1
        assert is_exact(await pool.generate(request()))


async def test_a_drained_backend_gets_nothing_new_until_it_is_registered_again():
    engines = [ScriptedEngine(SCRIPT), ScriptedEngine(SCRIPT)]
    async with running(*engines) as (pools, pool):
        drained = next(view for view in pool.views() if view.url == engines[0].url)
        assert pools.drain(drained.backend_id).state is BackendState.DRAINING
        before = engines[0].requests
        for _ in range(6):
            await pool.generate(request())
        assert engines[0].requests == before
        await pools.register(engines[0].url)
        assert state_of(pool, engines[0]) is BackendState.READY


async def test_a_removed_backends_requests_go_on_elsewhere():
    engines = [ScriptedEngine(SCRIPT, latency=0.3), ScriptedEngine(SCRIPT, latency=0.3)]
    async with running(*engines) as (pools, pool):
        results = []
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(collect, results, lambda: pool.generate(request()))
            await until(lambda: engines[0].in_flight)
            await pools.remove(next(view.backend_id for view in pool.views() if view.url == engines[0].url))
        assert all(is_exact(each) for each in results)
        assert len(pool.views()) == 1
        assert engines[0].in_flight == 0, "the engine was told"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.NO_LOGPROBS, "output_token_logprobs"),
        (Fault.GARBAGE, r"answered 200 with something other than JSON: .{\"text\": \"cut off"),
        (Fault.BAD_ID, "vocabulary"),
    ],
)
async def test_an_engine_that_lacks_something_is_not_registered(fault, message):
    async with ScriptedEngine(SCRIPT, faults=[fault]) as engine, Pools(OPTIONS) as pools:
        with pytest.raises(BackendProtocolError, match=message):
            await pools.register(engine.url)
        assert pools.views() == []


async def test_an_abort_of_all_requests_is_no_sign_of_what_an_engine_returns():
    faults = [Fault.QUEUE_ABORT, Fault.NO_EXTRAS, Fault.NO_EXTRAS]
    async with running(ScriptedEngine(SCRIPT, faults=faults)) as (_, pool):
        assert pool.views()[0].exports == []


async def test_an_engine_that_hangs_while_it_is_registered_holds_up_no_command():
    async with (
        ScriptedEngine(SCRIPT, faults=[Fault.HANG]) as hanging,
        running(ScriptedEngine(SCRIPT)) as (pools, pool),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(pools.register, hanging.url)
        await until(lambda: hanging.requests)
        with anyio.fail_after(OPTIONS.registration_timeout / 2):
            assert (await pool.update_weights("/w/3", 3)).changed
        tasks.cancel_scope.cancel()


async def test_an_engine_with_a_named_version_is_not_registered():
    async with ScriptedEngine(SCRIPT) as engine, Pools(OPTIONS) as pools:
        engine.version = "step-3"
        with pytest.raises(BackendProtocolError, match="step-3") as caught:
            await pools.register(engine.url)
        assert "weight_version" in caught.value.hint


async def test_an_engine_that_is_paused_is_not_registered_and_the_error_says_why():
    options = PoolOptions(registration_timeout=0.3)
    async with ScriptedEngine(SCRIPT) as engine, Pools(options) as pools:
        engine.paused = True
        with pytest.raises(BackendUnreachable) as caught:
            await pools.register(engine.url)
        assert "paused" in caught.value.hint


async def test_an_address_where_nothing_listens_is_not_registered():
    engine = ScriptedEngine(SCRIPT)
    async with engine:
        url = engine.url
    async with Pools(OPTIONS) as pools:
        with pytest.raises(BackendUnreachable) as caught:
            await pools.register(url)
        assert url in caught.value.hint


@pytest.mark.parametrize("url", ["", "localhost:3", "ftp://host", "http://", "http://a:b@host:3", "http://h/?q=1"])
async def test_a_malformed_address_is_refused(url):
    async with Pools(OPTIONS) as pools:
        with pytest.raises(ValueError, match="address"):
            await pools.register(url)


async def test_another_vocabulary_is_not_taken_into_the_pool():
    small = ScriptedEngine(SCRIPT, vocab_size=1024)
    async with running(ScriptedEngine(SCRIPT)) as (pools, _), small:
        with pytest.raises(BackendRejected, match="vocabulary of 1024"):
            await pools.register(small.url)


async def test_unknown_backends_are_named():
    async with Pools(OPTIONS) as pools:
        with pytest.raises(UnknownBackend, match="nobody"):
            await pools.remove("nobody")
        with pytest.raises(UnknownBackend, match="nobody"):
            pools.drain("nobody")


async def test_a_pool_whose_only_registration_failed_is_not_known():
    faults = [Fault.NO_LOGPROBS]
    async with ScriptedEngine(SCRIPT, faults=faults) as lacking, running(ScriptedEngine(SCRIPT)) as (pools, _):
        with pytest.raises(BackendProtocolError):
            await pools.register(lacking.url, "polciy")
        assert pools.names() == ["policy"]
