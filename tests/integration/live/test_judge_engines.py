"""The judge of served turns and the teacher, with engines behind HTTP: requests, pools and chat formats are real."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from prometheus_client import CollectorRegistry
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.trajectories import Message
from rollout_service.engines.contract import (
    GenerateRequest,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.serving.policies import PolicyServing, backend_id_of_spec
from rollout_service.engines.serving.text_sampler import PoolTextSampler
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.live.contract import TurnMarkRecord
from rollout_service.live.judging.factory import make_judge_stage
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.live.recorder import next_state
from rollout_service.live.replay import LIVE, pack
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveJudgeSettings
from rollout_service.store.file_backends import FileBackends
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.echoing import write
from tests.support.gateway.service import POLICY, scripted
from tests.support.live.judge import MarksSeen, judging
from tests.support.live.store import a_session, a_turn
from tests.support.samples import generation

pytestmark = pytest.mark.anyio
RENDERER = ChatRenderer.load(POLICY, "qwen3")
OUTPUT = write(RENDERER, "4")
HINT = "End each answer with an equals sign."


@asynccontextmanager
async def serving_pools(folder: Path, **engines: ScriptedEngine | EmbeddedEngine) -> AsyncIterator[PolicyServing]:
    with anyio.fail_after(60):
        async with Pools(PoolOptions()) as pools:
            serving = PolicyServing(pools, FileBackends(folder / "backends.json", backend_id_of_spec))
            for pool, engine in engines.items():
                await serving.register(BackendSpec(url=HttpUrl(engine.url), pool=pool), remember=False)
            yield serving


@asynccontextmanager
async def recorded_turn(says: str = "no, end with =") -> AsyncIterator[SqliteLiveStore]:
    """Keep one delivered turn of a session, as it would be captured, and what followed it."""
    capture = TurnCapture(RENDERER, LIVE)
    asked = (ClientMessage("system", "Be brief."), ClientMessage("user", "2 + 2?"))
    planned = capture.plan(ModelCall(dialect=Dialect.CHAT, model="policy", messages=asked))
    output = generation(OUTPUT, prompt_tokens=len(planned.prompt_ids))
    planned.complete(output)
    async with SqliteLiveStore(":memory:") as store:
        await store.open(a_session())
        await store.record(a_turn(answer="4", body=pack(capture, planned, output, delivered=True).encode()))
        await store.deliver("s", 0)
        state = next_state([ClientMessage("user", says)], 1.0)
        assert state is not None
        await store.follow("s", 0, state)
        yield store


async def judge_it(store: SqliteLiveStore, serving: PolicyServing, **settings: object) -> TurnMarkRecord:
    judge = PoolJudge(PoolTextSampler(serving), JudgeMetrics(CollectorRegistry()))
    seen = MarksSeen()
    described = LiveJudgeSettings.model_validate(settings)
    stage = await make_judge_stage(described, store, judge, serving, seen.judged)
    async with judging(stage):
        [mark] = await seen.wait_for(1)
    return mark


async def test_a_hint_is_rendered_into_the_recorded_prompt_and_a_teacher_reads_the_answer_after_it(
    tmp_path: Path,
) -> None:
    said = f"[HINT_START]{HINT}[HINT_END] \\boxed{{1}}"
    async with (
        scripted(said) as judge,
        scripted("4") as policy,
        serving_pools(tmp_path, judge=judge, policy=policy) as serving,
        recorded_turn() as store,
    ):
        mark = await judge_it(store, serving, hints=True)
        assert mark.hint is not None, mark.hint_dropped
        assert mark.hint.text == HINT
        text = RENDERER.decode(mark.hint.prompt_ids)
        assert f"2 + 2?\n\n[user's hint / instruction]\n{HINT}" in text
        assert "Be brief." in text
        reading = await TeacherReader(serving).read("policy", mark.hint.prompt_ids, OUTPUT)
        assert reading.teacher is not None, reading.reason
        assert len(reading.teacher.logprobs) == len(OUTPUT)
        assert reading.teacher.model.startswith(str(POLICY))


async def test_without_a_hint_the_policy_teaches_itself_nothing(tmp_path: Path) -> None:
    async with EmbeddedEngine(POLICY) as policy, serving_pools(tmp_path, policy=policy) as serving:
        prompt = RENDERER.render([Message(role="user", content="What is 2 + 2?")])
        sampling = SamplingOptions(max_new_tokens=40)
        _, engines = serving.connect("policy")
        turn = await engines.generate(GenerateRequest(new_request_id(), prompt, sampling))
        reading = await TeacherReader(serving).read("policy", prompt, turn.output_ids)
    assert reading.teacher is not None, reading.reason
    assert reading.teacher.logprobs == pytest.approx(turn.logprobs, abs=1e-3)
    assert reading.teacher.model == f"{POLICY}@0"
