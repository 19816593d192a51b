"""Each engine keeps the engine contract: the embedded one, real SGLang and vLLM, and the scripted ones."""

import aiohttp
import anyio
import pytest
from tokenizers import Tokenizer

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import Generation
from rollout_service.engines.errors import BackendRejected, PromptTooLong
from rollout_service.engines.kinds.sglang.wire import generate_body
from rollout_service.engines.pool.continuation import Continuation
from tests.support.engines.engine_under_test import ATTEMPTS, LONG, ON_SGLANG
from tests.support.waiting import collect

pytestmark = pytest.mark.anyio

PROMPT = [(7 * i + 11) % 256 for i in range(40)]
SPEAK_SGLANG = ["embedded", ON_SGLANG]


@pytest.fixture(scope="module")
def wholes() -> dict[str, Generation]:
    """Keep each engine's uninterrupted answer, which takes as long as a test and is always the same."""
    return {}


async def uninterrupted(engine, wholes):
    kind = engine.backend.id
    if kind not in wholes:
        wholes[kind] = await engine.generate(PROMPT, max_new_tokens=LONG)
    return wholes[kind]


async def test_every_token_has_a_logprob_and_a_version(engine):
    generation = await engine.generate(PROMPT, max_new_tokens=20, temperature=1.0)
    assert 1 <= len(generation.output_ids) <= 20, "it may have sampled the end"
    assert len(generation.output_ids) == len(generation.logprobs) == len(generation.versions)
    assert all(logprob <= 0 for logprob in generation.logprobs)
    assert set(generation.versions) == {0}
    assert generation.prompt_tokens == len(PROMPT)
    assert generation.backend_id == engine.backend.id


async def test_the_model_info_names_model_version_and_limits(engine):
    info = await engine.backend.model_info()
    assert info.model_path == str(engine.checkpoints.first)
    assert (info.weight_version, info.vocab_size, info.context_length) == (0, 512, 2048)


async def test_logprobs_are_not_those_of_what_top_p_leaves(model_engine):
    greedy = await model_engine.generate(PROMPT, max_new_tokens=10)
    request = model_engine.request(PROMPT, max_new_tokens=10, temperature=1.0, top_p=1e-6)
    if model_engine.renormalizes:
        with pytest.raises(BackendRejected, match="computes logprobs after top_p"):
            await model_engine.backend.generate(request)
        return
    nucleus = await model_engine.backend.generate(request)
    assert nucleus.output_ids == greedy.output_ids
    assert nucleus.logprobs == pytest.approx(greedy.logprobs, abs=1e-4)


async def test_a_greedy_token_has_its_logprob_at_temperature_one(model_engine):
    zero = await model_engine.generate(PROMPT, max_new_tokens=5, temperature=0.0)
    only_one = await model_engine.generate(PROMPT, max_new_tokens=5, temperature=0.25, top_k=1)
    assert only_one.output_ids == zero.output_ids
    assert only_one.logprobs == pytest.approx(zero.logprobs, abs=1e-4)


async def test_logprobs_are_scaled_by_the_temperature(model_engine):
    plain = await model_engine.generate(PROMPT, max_new_tokens=1)
    while True:
        cold = await model_engine.generate(PROMPT, max_new_tokens=1, temperature=0.25)
        if cold.output_ids == plain.output_ids:
            break
    assert cold.logprobs[0] > plain.logprobs[0] + 0.1


async def test_a_repeated_prompt_is_cached_but_for_its_last_token(model_engine):
    first = await model_engine.generate(PROMPT, max_new_tokens=10)
    again = await model_engine.generate(PROMPT, max_new_tokens=10)
    assert (first.cached_tokens, again.cached_tokens) == (0, model_engine.cached(len(PROMPT) - 1))


async def test_the_next_turn_finds_the_last_one_cached(model_engine):
    turn = await model_engine.generate(PROMPT, max_new_tokens=10)
    next_prompt = [*PROMPT, *turn.output_ids, 5, 6, 7]
    next_turn = await model_engine.generate(next_prompt, max_new_tokens=2)
    # The last sampled token was never fed back, so it has no KV.
    assert next_turn.cached_tokens == model_engine.cached(len(PROMPT) + 9)


async def test_a_stop_text_ends_the_turn_and_is_kept(model_engine):
    tokenizer = Tokenizer.from_file(str(model_engine.checkpoints.first / "tokenizer.json"))
    greedy = await model_engine.generate(PROMPT, max_new_tokens=20)
    token = next(each for each in greedy.output_ids if each > 256)  # a special token, which has its own text
    end = greedy.output_ids.index(token) + 1
    text = tokenizer.decode([token], skip_special_tokens=False)
    stopped = await model_engine.generate(PROMPT, max_new_tokens=20, stop=[text])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.matched == text
    assert stopped.output_ids == greedy.output_ids[:end]


async def test_an_abort_hands_back_what_there_is(engine):
    partial = await engine.interrupt(lambda: engine.request(PROMPT, max_new_tokens=LONG))
    assert len(partial.output_ids) < LONG
    assert len(partial.output_ids) == len(partial.logprobs) == len(partial.versions)


async def test_an_abort_of_another_request_changes_nothing(engine):
    request = engine.request(PROMPT, max_new_tokens=200)
    async with engine.running(request) as result:
        await engine.backend.abort("0" * 32)
    assert result[0].finish_reason is FinishReason.LENGTH
    assert len(result[0].output_ids) == 200


async def test_a_request_that_goes_on_after_an_abort_ends_as_if_it_had_not_been(engine, wholes):
    whole = await uninterrupted(engine, wholes)
    continuations = []

    def begin():
        continuations.append(Continuation(engine.request(PROMPT, max_new_tokens=LONG)))
        return continuations[-1].next_request()

    partial = await engine.interrupt(begin)
    continuation = continuations[-1]
    assert continuation.add(partial) is None
    resumed = continuation.add(await engine.backend.generate(continuation.next_request()))
    assert resumed is not None
    assert resumed.output_ids == whole.output_ids
    assert resumed.logprobs == pytest.approx(whole.logprobs, abs=1e-3)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_pause_that_keeps_requests_changes_no_token(engine, wholes, mode):
    whole = await uninterrupted(engine, wholes)
    async with engine.paused(mode, PROMPT) as result:
        assert result == []
    assert result[0].output_ids == whole.output_ids
    assert result[0].finish_reason is FinishReason.LENGTH


async def test_a_pause_may_end_what_is_running(engine):
    async with engine.paused(PauseMode.ABORT, PROMPT) as result:
        assert result[0].finish_reason is FinishReason.ABORT
        assert len(result[0].output_ids) < LONG


async def test_requests_wait_while_the_engine_is_paused(engine):
    await engine.backend.pause(PauseMode.ABORT)
    waiting = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, waiting, lambda: engine.generate(PROMPT, max_new_tokens=3))
        await engine.backend.health(paused=True)
        assert waiting == []
        await engine.backend.resume()
    assert len(waiting[0].output_ids) == 3


async def test_an_update_splits_the_versions_where_it_happened(engine, wholes):
    whole = await uninterrupted(engine, wholes)
    async with engine.paused(PauseMode.IN_PLACE, PROMPT) as result:
        await engine.backend.update_weights(str(engine.checkpoints.second), 7, flush_cache=False)
    versions = result[0].versions
    split = versions.index(7)
    assert versions == [0] * split + [7] * (LONG - split)
    assert result[0].output_ids[:split] == whole.output_ids[:split]


async def test_an_update_changes_the_model_and_empties_the_cache(model_engine):
    before = await model_engine.generate(PROMPT, max_new_tokens=20)
    await model_engine.backend.update_weights(str(model_engine.checkpoints.second), 3)
    after = await model_engine.generate(PROMPT, max_new_tokens=20)
    assert (await model_engine.backend.model_info()).weight_version == 3
    assert set(after.versions) == {3}
    assert after.cached_tokens == 0
    assert after.output_ids != before.output_ids


async def test_an_update_that_fails_leaves_the_engine_as_it_was(model_engine, tmp_path):
    before = await model_engine.generate(PROMPT, max_new_tokens=10)
    with pytest.raises(BackendRejected):
        await model_engine.backend.update_weights(str(tmp_path / "nothing"), 9)
    after = await model_engine.generate(PROMPT, max_new_tokens=10)
    assert after.output_ids == before.output_ids
    assert after.versions == before.versions


async def test_a_prompt_that_does_not_fit_is_refused_by_name(engine):
    with pytest.raises(PromptTooLong):
        await engine.generate([5] * 2040, max_new_tokens=100)
    with pytest.raises(PromptTooLong):
        await engine.generate([5] * 2100, max_new_tokens=1)


async def test_the_longest_prompt_that_fits_is_served(model_engine):
    generation = await model_engine.generate([5] * 2024, max_new_tokens=24)
    assert generation.finish_reason is FinishReason.LENGTH
    assert len(generation.output_ids) in (22, 24), "SGLang leaves the last two positions free"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"sampling_params": {"no_such_field": 1}}, id="unknown sampling field"),
        pytest.param({"sampling_params": {"temperature": -1.0}}, id="negative temperature"),
        pytest.param({"sampling_params": {"top_p": 0.0}}, id="top_p of zero"),
        pytest.param({"input_ids": "text"}, id="prompt of another type"),
    ],
)
@pytest.mark.parametrize("model_engine", SPEAK_SGLANG, indirect=True)
async def test_bad_requests_are_refused(model_engine, change):
    body = generate_body(model_engine.request(PROMPT, max_new_tokens=2)) | change
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{model_engine.backend.url}/generate", json=body) as answer,
    ):
        assert answer.status == 400


async def test_many_requests_at_once_get_what_they_would_get_alone(model_engine):
    prompts = [PROMPT[: 5 + 3 * i] for i in range(12)]
    alone = [
        (await model_engine.generate(prompt, max_new_tokens=15 + i)).output_ids for i, prompt in enumerate(prompts)
    ]
    await model_engine.backend.update_weights(str(model_engine.checkpoints.first), 0)
    together = {}

    async def generate(index):
        together[index] = (await model_engine.generate(prompts[index], max_new_tokens=15 + index)).output_ids

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(generate, index)
    assert [together[index] for index in range(len(prompts))] == alone


async def test_a_cancelled_call_ends_in_the_engine(engine):
    for _ in range(ATTEMPTS):
        with anyio.CancelScope() as scope:
            async with engine.running(engine.request(PROMPT, max_new_tokens=LONG)) as result:
                if not result:
                    scope.cancel()
        if scope.cancelled_caught:
            break
    assert scope.cancelled_caught, "every call ended before it was cancelled"
    with anyio.fail_after(5):
        while (await engine.backend.load()).running:
            await anyio.sleep(0.01)
