"""The scripted engine's simulated hardware reports what is really cached, and takes the time that it states."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.testing import Counting, Hardware, ScriptedEngine
from rollout_service.testing.hardware import KVCache
from tests.support.waiting import collect

pytestmark = pytest.mark.anyio

PAGE = 16


def run(cache, ids):
    """Run one request from beginning to end, and return how many of its tokens were cached."""
    hold = cache.take(ids)
    cache.release(hold)
    return hold.cached_tokens


def test_nothing_is_cached_the_first_time_and_whole_pages_the_second():
    cache = KVCache()
    assert run(cache, range(40)) == 0
    assert run(cache, range(40)) == 2 * PAGE
    assert run(cache, [*range(40), *range(100)]) == 2 * PAGE


def test_the_last_token_is_always_read():
    cache = KVCache()
    run(cache, range(32))
    assert run(cache, range(32)) == 31


def test_sampled_tokens_are_cached_too():
    cache = KVCache()
    hold = cache.take(range(16))
    cache.extend(hold, range(48))
    cache.release(hold)
    assert run(cache, range(60)) == 48


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings():
    cache = KVCache(4 * PAGE)
    old, new = list(range(32)), list(range(1000, 1032))
    run(cache, old)
    run(cache, new)
    run(cache, range(2000, 2016))
    assert cache.used_tokens == 4 * PAGE
    assert run(cache, [*old[:16], 7]) == PAGE
    assert run(cache, [*new, 7]) == 2 * PAGE


def test_pages_in_use_stay():
    cache = KVCache(2 * PAGE)
    hold = cache.take(range(32))
    assert run(cache, range(1000, 1032)) == 0
    assert run(cache, range(1000, 1032)) == 0  # there was no room to keep it
    cache.flush()
    cache.release(hold)
    assert run(cache, [*range(32), 1]) == 2 * PAGE


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=80).map(lambda ids: [1, *ids]), max_size=30),
    pages=st.integers(1, 8),
)
def test_a_bounded_cache_keeps_its_bound_and_never_claims_more_than_an_unbounded_one(prompts, pages):
    bounded, free = KVCache(pages * PAGE), KVCache()
    for prompt in prompts:
        assert run(bounded, prompt) <= run(free, prompt) < len(prompt)
        assert bounded.used_tokens <= pages * PAGE


def ask(backend, ids, budget=4):
    return backend.generate(GenerateRequest(new_request_id(), ids, SamplingOptions(max_new_tokens=budget)))


async def test_an_engine_reports_what_it_had_cached():
    async with ScriptedEngine(Counting(), hardware=Hardware()) as engine:
        backend = SGLangBackend(engine.url)
        first = await ask(backend, list(range(64)), budget=17)
        again = await ask(backend, [*range(64), *first.output_ids, 1, 2, 3])
        assert (first.cached_tokens, again.cached_tokens) == (0, 80)
        load = await backend.load()
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
        assert load.capacity_tokens == Hardware().kv_tokens
        assert load.used_tokens >= 80
        await backend.update_weights("/weights/1", 1)
        assert (await ask(backend, [*range(64), 1])).cached_tokens == 0
        await backend.close()


async def test_a_full_batch_queues_and_an_abort_ends_the_wait():
    hardware = Hardware(max_running=1, decode_seconds=1.0)
    async with ScriptedEngine(Counting(), hardware=hardware) as engine:
        backend = SGLangBackend(engine.url)
        answers = []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(collect, answers, lambda: ask(backend, list(range(50)), budget=30))
                tasks.start_soon(collect, answers, lambda: ask(backend, list(range(50)), budget=30))
                while (await backend.load()).waiting != 1:
                    await anyio.sleep(0.01)
                load = await backend.load()
                assert (load.running, load.waiting_tokens) == (1, 50)
                await backend.abort()
        assert all(answer.finish_reason == "abort" for answer in answers)
        load = await backend.load()
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
        await backend.close()
