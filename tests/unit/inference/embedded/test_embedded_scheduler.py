"""Each request of the embedded engine gets its own tokens, whatever joins, leaves, waits or is interrupted."""

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_schemas.inference import PauseMode
from rollout_service.engines.kinds.embedded.bodies import PromptReading
from rollout_service.engines.kinds.embedded.job import EngineJob
from rollout_service.engines.kinds.embedded.sampler import SamplerSettings
from rollout_service.engines.kinds.embedded.scheduler import EngineBusyError, EngineCore, EngineOptions
from rollout_service.engines.kinds.embedded.weights import ModelError
from rollout_service.testing import Shape, write_random_checkpoint

SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=300, context=512)
SECONDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "small", SMALL)


@pytest.fixture
def make_engine(folder):
    """Yield a function that starts engines; they are stopped after the test."""
    engines = []

    def make(decode=None, **options):
        engine = EngineCore(str(folder), EngineOptions(**options), decode=decode)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
        assert not engine.is_alive


class Asked:
    """A request whose progress a test can follow; the engine waits at `held_at` tokens for an order."""

    def __init__(
        self, engine, prompt, *, rid="r", budget=10, seed=1, stops=(), stop_ids=frozenset(), start=None, held_at=None
    ):
        self._changed = threading.Semaphore(0)
        self._held_at = held_at
        self._is_ordered = threading.Event()
        self.job = EngineJob(
            rid=rid,
            prompt=list(prompt),
            sampler=SamplerSettings(seed=seed),
            max_new_tokens=budget,
            stop_ids=stop_ids,
            stop_texts=stops,
            notify=self._notify,
            streams=True,
            reading=None if start is None else PromptReading(list(prompt), start),
        )
        engine.submit(self.job)

    def _notify(self):
        self._changed.release()
        if self._held_at is not None and len(self.job.output) >= self._held_at:
            assert self._is_ordered.wait(SECONDS)

    def meanwhile(self, order):
        while len(self.job.output) < self._held_at:
            assert self._changed.acquire(timeout=SECONDS)
        given = order()
        self._is_ordered.set()
        return given

    def result(self):
        while self.job.finish is None:
            assert self._changed.acquire(timeout=SECONDS)
        return self.job


def alone(make_engine, prompt, **asked):
    return list(Asked(make_engine(), prompt, **asked).result().output)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 30), st.integers(0, 9)),
        min_size=1,
        max_size=10,
    ),
    max_running=st.integers(1, 4),
    chunk=st.sampled_from([1, 7, 512]),
    kv_tokens=st.sampled_from([80, 200, 100_000]),
)
def test_neighbors_limits_and_the_cache_change_no_token(make_engine, asked, max_running, chunk, kv_tokens):
    crowd = make_engine(max_running=max_running, prefill_chunk=chunk, kv_tokens=kv_tokens)
    waiting = [
        Asked(crowd, prompt, rid=str(index), budget=budget, seed=seed)
        for index, (prompt, budget, seed) in enumerate(asked)
    ]
    reference = make_engine(max_running=1, kv_tokens=100_000)
    for each, (prompt, budget, seed) in zip(waiting, asked, strict=True):
        reference.flush_cache().result(SECONDS)
        expected = Asked(reference, prompt, budget=budget, seed=seed).result()
        assert each.result().output == expected.output
        assert each.job.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    crowd.abort(None).result(SECONDS)
    assert crowd.stats.reserved_tokens == 0


def test_a_stop_string_of_characters_that_take_several_tokens_is_found(make_engine):
    ids = alone(make_engine, [1, 2], budget=12)
    byte_of = dict(zip(ids, "aa你好吗!".encode(), strict=True))
    assert len(byte_of) == 12, "each token spells a byte"
    engine = make_engine(decode=lambda some: bytes(byte_of[id_] for id_ in some).decode(errors="replace"))
    job = Asked(engine, [1, 2], budget=12, stops=("你好吗",)).result()
    assert (job.output, job.finish) == (ids[:11], {"type": "stop", "matched": "你好吗"})


def test_the_cache_counts_to_the_token(make_engine):
    engine = make_engine()
    first = Asked(engine, range(50), budget=5).result()
    again = Asked(engine, [*range(50), *first.output, 7, 8]).result()
    branch = Asked(engine, [*range(30), 9, 9]).result()
    assert (first.cached_tokens, again.cached_tokens, branch.cached_tokens) == (0, 54, 30)


def test_requests_of_a_group_share_their_prompt_at_once(make_engine):
    engine = make_engine()
    group = [Asked(engine, range(100), rid=str(i), seed=i, budget=30) for i in range(6)]
    cached = sorted(each.result().cached_tokens for each in group)
    assert cached == [0, 99, 99, 99, 99, 99]
    assert len({tuple(each.job.output) for each in group}) == 6


@pytest.mark.slow
def test_an_abort_hands_back_what_there_is_and_leaves_the_others(make_engine):
    engine = make_engine()
    kept = Asked(engine, [1, 2], rid="bb", budget=300, seed=4)
    ended = Asked(engine, [3, 4], rid="aa-1", budget=400, held_at=3)
    ended.meanwhile(lambda: engine.abort("aa")).result(SECONDS)
    job = ended.result()
    assert job.finish["type"] == "abort"
    assert 3 <= len(job.output) == len(job.logprobs) < 400
    assert kept.result().output == alone(make_engine, [1, 2], budget=300, seed=4)


def test_an_abort_reaches_requests_that_wait(make_engine):
    engine = make_engine(max_running=1)
    running = Asked(engine, [1], rid="a", budget=400, held_at=1)
    waiting = Asked(engine, [2], rid="b")
    running.meanwhile(lambda: engine.abort(None)).result(SECONDS)
    assert waiting.result().output == []
    assert running.result().finish["type"] == waiting.job.finish["type"] == "abort"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_pause_changes_no_token(make_engine, mode):
    engine = make_engine()
    asked = [Asked(engine, [i, i + 1], rid=str(i), budget=200, seed=i, held_at=5) for i in range(3)]
    paused = [each.meanwhile(lambda: engine.pause(mode)) for each in asked]
    paused[-1].result(SECONDS)
    before = [len(each.job.output) for each in asked]
    engine.set_version("default").result(SECONDS)
    assert [len(each.job.output) for each in asked] == before
    engine.resume().result(SECONDS)
    for i, each in enumerate(asked):
        job = each.result()
        assert job.output == alone(make_engine, [i, i + 1], budget=200, seed=i)
        assert job.retractions == (mode is PauseMode.RETRACT)


@pytest.mark.slow
def test_a_flush_needs_the_kv_to_be_free(make_engine):
    engine = make_engine()
    asked = Asked(engine, [1, 2], budget=400, held_at=1)
    asked.meanwhile(lambda: engine.pause(PauseMode.IN_PLACE)).result(SECONDS)
    with pytest.raises(EngineBusyError):
        engine.flush_cache().result(SECONDS)
    with pytest.raises(EngineBusyError, match="flush_cache"):
        engine.update_weights(engine.model_path, "2", flush_cache=True).result(SECONDS)
    engine.pause(PauseMode.RETRACT).result(SECONDS)
    engine.flush_cache().result(SECONDS)
    engine.resume().result(SECONDS)
    assert len(asked.result().output) == 400


def test_an_update_without_a_pause_waits_for_what_is_running_and_holds_what_is_not(make_engine, folder):
    engine = make_engine()
    running = Asked(engine, [1, 2], rid="a", budget=200, held_at=1)
    updated = running.meanwhile(lambda: engine.update_weights(str(folder), "5", flush_cache=True))
    later = Asked(engine, [1, 2], rid="b", budget=5)
    updated.result(SECONDS)
    assert running.result().meta_info("")["weight_version"] == "default"
    assert later.result().meta_info("")["weight_version"] == "5"
    assert later.job.cached_tokens == 0


def test_weights_of_another_shape_are_refused_and_the_engine_keeps_serving(make_engine, tmp_path):
    engine = make_engine()
    other = write_random_checkpoint(tmp_path / "other", Shape(layers=1))
    with pytest.raises(ModelError, match="shape"):
        engine.update_weights(str(other), "2", flush_cache=True)
    with pytest.raises(ModelError):
        engine.update_weights(str(tmp_path / "nothing"), "2", flush_cache=True)
    assert len(Asked(engine, [1]).result().output) == 10


def test_stopping_ends_every_request(folder):
    engine = EngineCore(str(folder))
    engine.start()
    asked = [Asked(engine, [1, 2], rid=str(i), budget=400) for i in range(3)]
    engine.stop()
    assert all(each.result().finish is not None for each in asked)


def test_the_counters_add_up(make_engine):
    engine = make_engine()
    for _ in range(2):
        Asked(engine, range(40), budget=5).result()
    engine.abort(None).result(SECONDS)
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens) == (80, 39)
    assert engine.stats.generated_tokens == 10
    assert (engine.stats.running, engine.stats.waiting, engine.stats.reserved_tokens) == (0, 0, 0)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunk=st.integers(1, 40), start=st.integers(0, 39), repeats=st.integers(1, 3))
def test_chunks_and_the_cache_change_no_logprob_of_a_prompt(make_engine, chunk, start, repeats):
    turn = Asked(make_engine(), range(1, 11), budget=30).result()
    engine = make_engine(prefill_chunk=chunk)
    for _ in range(repeats):
        job = Asked(engine, turn.tokens, budget=2, start=start).result()
        assert len(job.reading.logprobs) == 39 - start
        expected = turn.logprobs[max(0, start - 9) :]
        assert job.reading.logprobs[-len(expected) :] == pytest.approx(expected, abs=1e-4)
        [first, *rest] = job.meta_info("1")["input_token_logprobs"]
        assert first == [None, turn.tokens[start], None]
        assert [token for _, token, _ in rest] == turn.tokens[start + 1 :]


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_an_interrupted_prompt_is_read_anew_with_the_weights_that_follow(make_engine, folder, tmp_path, mode):
    other = write_random_checkpoint(tmp_path / "other", SMALL, seed=9)
    prompt = [1 + i % 250 for i in range(400)]
    engine = EngineCore(str(folder), EngineOptions(prefill_chunk=150))
    asked = Asked(engine, prompt, budget=1, start=0)
    engine._obey()
    engine._prefill()
    assert len(asked.job.reading.logprobs) == 150
    engine.pause(mode)
    engine.update_weights(str(other), "2", flush_cache=mode is PauseMode.RETRACT)
    engine._obey()
    engine._apply_updates()
    engine.resume()
    engine.start()
    try:
        job = asked.result()
    finally:
        engine.stop()
    fresh = make_engine()
    fresh.update_weights(str(other), "2", flush_cache=True).result(SECONDS)
    expected = Asked(fresh, prompt, budget=1, start=0).result()
    assert job.reading.logprobs == pytest.approx(expected.reading.logprobs, abs=1e-4)
