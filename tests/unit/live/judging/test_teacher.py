"""A teacher's log-probabilities have one entry per sampled token, or there are none; nothing is filled in."""

import math

import anyio
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.contract import GenerateRequest, Generation, ReturnedExtras
from rollout_service.engines.errors import ExtraUnsupported
from rollout_service.engines.serving.policies import PoolModel
from rollout_service.engines.shipped import policy_folder
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.tokens import ChatRenderer
from tests.support.live.pools import FunctionEngines, FunctionModels, generation

RENDERER = ChatRenderer.load(policy_folder("calc-tuned"), "qwen3")


def reads(*logprobs: float | None, version: int | None = 3) -> FunctionEngines:
    return FunctionEngines(
        lambda _: generation(ReturnedExtras(prompt_logprobs=list(logprobs)), version=version)
    )


async def test_each_sampled_token_has_its_logprob_after_the_hinted_prompt():
    engines = reads(-0.1, -2.0, -0.3)
    reading = await TeacherReader(FunctionModels(RENDERER, policy=engines)).read(
        "policy", [5, 6, 7, 8], [1, 2, 3]
    )
    assert reading.reason == ""
    assert reading.teacher is not None
    assert reading.teacher.logprobs == [-0.1, -2.0, -0.3]
    assert reading.teacher.model == "models/teacher@3"
    [request] = engines.requests
    assert request.input_ids == [5, 6, 7, 8, 1, 2, 3]
    assert request.extras.prompt_logprobs_from == 4
    assert (request.sampling.temperature, request.sampling.max_new_tokens) == (1.0, 1)


@given(
    st.lists(st.one_of(st.none(), st.floats(), st.integers(-9, 0).map(float)), max_size=5), st.integers(0, 5)
)
def test_there_is_one_finite_entry_per_token_or_none_at_all(read, sampled):
    async def run() -> None:
        reader = TeacherReader(FunctionModels(RENDERER, policy=reads(*read)))
        reading = await reader.read("policy", [9], list(range(1, sampled + 1)))
        whole = len(read) == sampled > 0 and all(one is not None and math.isfinite(one) for one in read)
        assert (reading.teacher is not None) == whole
        assert (reading.reason == "incomplete") == (not whole)
        if reading.teacher is not None:
            assert reading.teacher.logprobs == read

    anyio.run(run)


async def test_an_answer_without_a_version_or_extras_is_none():
    for engines in (reads(-1.0, version=None), FunctionEngines(lambda _: generation())):
        reading = await TeacherReader(FunctionModels(RENDERER, policy=engines)).read("policy", [9], [1])
        assert (reading.teacher, reading.reason) == (None, "incomplete")


async def test_failures_are_reasons():
    def refuse(_: GenerateRequest) -> Generation:
        raise ExtraUnsupported("does not return prompt_logprobs")

    class Hangs(FunctionEngines):
        async def generate(self, request: GenerateRequest) -> Generation:
            await anyio.sleep_forever()
            raise AssertionError

    async def reason(engines: FunctionEngines, pool: str | None = None, length: int = 4_096) -> str:
        models = FunctionModels(RENDERER, context_length=length, policy=engines)
        reading = await TeacherReader(models, pool, read_seconds=0.05).read("policy", [1] * 20, [1])
        assert reading.teacher is None
        return reading.reason

    assert await reason(FunctionEngines(refuse)) == "export_unsupported"
    assert await reason(Hangs(lambda _: generation())) == "timeout"
    assert await reason(reads(-1.0), pool="teacher") == "no_backend"
    assert await reason(reads(-1.0), length=22) == "context_full"


async def test_a_teacher_with_another_vocabulary_is_not_asked():
    class Shifted(ChatRenderer):
        def decode(self, ids: object) -> str:
            return "something else"

    other = object.__new__(Shifted)
    other.__dict__.update(RENDERER.__dict__)
    teacher = reads(-1.0)
    models = FunctionModels(RENDERER, policy=reads(-2.0), teacher=teacher)
    reader = TeacherReader(models, "teacher")
    assert (await reader.read("policy", [9], [1])).teacher is not None
    models.served["teacher"] = PoolModel(other, 4_096)
    assert (await reader.read("policy", [9], [1])).reason == "other_vocabulary"
    assert len(teacher.requests) == 1
