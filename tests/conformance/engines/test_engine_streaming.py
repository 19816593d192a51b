"""Each engine streams what it answers: every token once, with its logprob, however the request ends."""

import anyio
import pytest

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import RequestedExtras
from rollout_service.engines.errors import SchemaRefused
from tests.support.engines.engine_under_test import ATTEMPTS, LONG, ON_SGLANG, ON_VLLM, until_idle

pytestmark = pytest.mark.anyio

PROMPT = [(7 * i + 11) % 256 for i in range(40)]
SCHEMA = """{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
 "additionalProperties": false}"""
CONSTRAINING = [ON_SGLANG, ON_VLLM]


class Sink:
    """Collects the chunks of an answer."""

    def __init__(self):
        self.chunks = []

    def __call__(self, chunk):
        assert len(chunk.ids) == len(chunk.logprobs) >= 1
        assert chunk.versions is None or len(chunk.versions) == len(chunk.ids)
        self.chunks.append(chunk)

    @property
    def ids(self):
        return [id_ for chunk in self.chunks for id_ in chunk.ids]

    def is_whole(self, generation):
        """Return whether the chunks are the answer."""
        logprobs = [value for chunk in self.chunks for value in chunk.logprobs]
        versions = [chunk.versions for chunk in self.chunks]
        known = None not in versions
        return (
            self.ids == generation.output_ids
            and logprobs == generation.logprobs
            and (not known or [each for part in versions for each in part] == generation.versions)
        )


async def streamed(engine, request):
    sink = Sink()
    return await engine.backend.generate(request, sink), sink


async def test_chunks_are_the_answer(engine):
    for budget in (40, 40, 1, 2, 3, LONG):  # the second time it is known how the engine streams
        generation, sink = await streamed(engine, engine.request(PROMPT, max_new_tokens=budget))
        assert generation.finish_reason is FinishReason.LENGTH
        assert len(generation.output_ids) == budget
        assert sink.is_whole(generation)
        assert len(sink.chunks) > min(1, budget // 40)


async def test_a_streamed_answer_is_the_unstreamed_one(model_engine):
    request = model_engine.request(PROMPT, RequestedExtras(), max_new_tokens=60)
    streamed_one, _ = await streamed(model_engine, request)
    other = await model_engine.generate(PROMPT, max_new_tokens=60)
    assert streamed_one.output_ids == other.output_ids
    assert streamed_one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert streamed_one.versions == other.versions


async def test_a_stop_token_ends_the_stream_and_is_kept(model_engine):
    greedy = await model_engine.generate(PROMPT, max_new_tokens=20)
    stop = greedy.output_ids[12]
    end = greedy.output_ids.index(stop) + 1
    request = model_engine.request(PROMPT, max_new_tokens=20, stop_token_ids=[stop])
    generation, sink = await streamed(model_engine, request)
    assert (generation.finish_reason, generation.matched) == (FinishReason.STOP, stop)
    assert generation.output_ids == greedy.output_ids[:end]
    assert sink.is_whole(generation)


async def test_many_streams_at_once_are_not_mixed_up(model_engine):
    prompts = [PROMPT[: 5 + 3 * i] for i in range(12)]
    sinks, answers = [Sink() for _ in prompts], {}

    async def generate(index):
        request = model_engine.request(prompts[index], max_new_tokens=15 + index)
        answers[index] = await model_engine.backend.generate(request, sinks[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(generate, index)
    for index, sink in enumerate(sinks):
        assert len(answers[index].output_ids) == 15 + index
        assert sink.is_whole(answers[index])


async def in_the_middle(engine, act):
    """Act once a stream has begun, and return its answer and its chunks; repeat if it ended before."""
    for _ in range(ATTEMPTS):
        await until_idle(engine.backend)
        request, sink, result = engine.request(PROMPT, max_new_tokens=LONG), Sink(), []

        async def generate(request=request, sink=sink, result=result):
            result.append(await engine.backend.generate(request, sink))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while not sink.chunks and not result:
                await anyio.sleep(0.002)
            was_early = not result
            await act(request, tasks)
        if was_early and (not result or result[0].finish_reason is FinishReason.ABORT):
            return result, sink
    return pytest.fail(f"{ATTEMPTS} streams ended before they could be interrupted")


async def test_an_abort_in_the_middle_delivers_what_it_hands_back(engine):
    async def abort(request, _):
        await engine.backend.abort(request.request_id)

    (partial,), sink = await in_the_middle(engine, abort)
    assert 0 < len(partial.output_ids) < LONG
    assert sink.is_whole(partial)


async def test_a_cancelled_stream_ends_in_the_engine_and_delivers_no_more(engine):
    async def cancel(_, tasks):
        tasks.cancel_scope.cancel()

    result, sink = await in_the_middle(engine, cancel)
    assert result == []
    delivered = len(sink.chunks)
    with anyio.fail_after(5):
        await until_idle(engine.backend)
    assert len(sink.chunks) == delivered


async def test_a_pause_that_aborts_ends_the_stream_with_what_there_is(engine):
    async def pause(_, __):
        await engine.backend.pause(PauseMode.ABORT)
        await engine.backend.resume()

    (partial,), sink = await in_the_middle(engine, pause)
    assert sink.is_whole(partial)


async def test_a_stream_goes_on_after_an_update_with_the_new_version(engine):
    for _ in range(ATTEMPTS):
        await engine.backend.update_weights(str(engine.checkpoints.first), 0)
        sink, result = Sink(), []

        async def generate(sink=sink, result=result):
            request = engine.request(PROMPT, max_new_tokens=LONG)
            result.append(await engine.backend.generate(request, sink))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while not sink.chunks and not result:
                await anyio.sleep(0.002)
            await engine.backend.pause(PauseMode.IN_PLACE)
            await engine.backend.update_weights(str(engine.checkpoints.second), 7, flush_cache=False)
            await engine.backend.resume()
        if 7 in result[0].versions:
            break
    split = result[0].versions.index(7)
    assert result[0].versions == [0] * split + [7] * (LONG - split)
    assert sink.is_whole(result[0])


@pytest.mark.parametrize("model_engine", CONSTRAINING, indirect=True)
async def test_chunks_have_the_likeliest_tokens(model_engine):
    request = model_engine.request(PROMPT, RequestedExtras(top_logprobs=3), max_new_tokens=30)
    generation, sink = await streamed(model_engine, request)
    assert sink.is_whole(generation)
    assert len(sink.chunks) > 1
    assert [row for chunk in sink.chunks for row in chunk.top_logprobs] == generation.extras.top_logprobs


@pytest.mark.parametrize("model_engine", CONSTRAINING, indirect=True)
async def test_prompt_logprobs_come_with_an_answer_in_one_chunk(model_engine):
    request = model_engine.request(PROMPT, RequestedExtras(prompt_logprobs_from=0), max_new_tokens=30)
    generation, sink = await streamed(model_engine, request)
    assert len(generation.extras.prompt_logprobs) == len(PROMPT)
    assert [chunk.ids for chunk in sink.chunks] == [generation.output_ids]


@pytest.mark.parametrize(
    ("model_engine", "schema"),
    [
        ("embedded", SCHEMA),
        *(pytest.param(*each.values, '{"type": 7}', marks=each.marks) for each in CONSTRAINING),
    ],
    indirect=["model_engine"],
)
async def test_a_schema_that_an_engine_cannot_follow_is_refused_by_name(model_engine, schema):
    with pytest.raises(SchemaRefused, match=r"(?i)schema|grammar"):
        await model_engine.generate(PROMPT, max_new_tokens=60, json_schema=schema)
    assert len((await model_engine.generate(PROMPT, max_new_tokens=2)).output_ids) == 2


@pytest.mark.parametrize("model_engine", CONSTRAINING, indirect=True)
async def test_text_matches_its_json_schema(model_engine):
    generation = await model_engine.generate(PROMPT, max_new_tokens=60, json_schema=SCHEMA)
    text = model_engine.text(generation.output_ids)
    assert "".join(text.split()) in {'{"a":1}', '{"a":2}'}
    assert len(generation.logprobs) == len(generation.output_ids)
