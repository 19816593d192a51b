"""A judge is served by a pool of its own, next to the policy; where it fails, the rollout fails and is not a zero."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Stage
from api_schemas.tasks import Task
from rollout_service.settings import PipelineSettings
from rollout_service.testing import ScriptedEngine
from tests.support.gateway.service import GatewayService, gateway_service, scripted

pytestmark = pytest.mark.anyio
TASK = Task(environment="stem", instance={"question": "Which gas?", "answer": "hydrogen"})
ONCE = PipelineSettings(max_attempts=1)


@asynccontextmanager
async def judged_by(folder: Path, *says: str) -> AsyncIterator[tuple[GatewayService, ScriptedEngine]]:
    """Run a service whose policy answers H_2, and whose judge says these texts."""
    with anyio.fail_after(120):
        async with (
            scripted(r"\boxed{H_2}") as policy,
            scripted(*says) as judge,
            gateway_service(folder, [policy], pipeline=ONCE) as service,
        ):
            await service.client.add_backend(BackendSpec(url=HttpUrl(judge.url), pool="judge"))
            yield service, judge


async def run(service: GatewayService, rollout_id: str) -> Rollout:
    await service.client.submit(RolloutRequest(rollout_id=rollout_id, task=TASK))
    return await service.client.wait(rollout_id, timeout_seconds=60)


async def test_equal_answers_are_judged_once_and_its_tokens_are_counted(tmp_path: Path) -> None:
    async with judged_by(tmp_path, "H_2 is hydrogen.\nVERDICT: correct") as (service, judge):
        before = judge.requests
        rollouts = [await run(service, f"r-{number}") for number in range(3)]
        assert judge.requests == before + 1
        metrics = await service.metrics()
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3
    assert [rollout.reward_parts["by_rule"] for rollout in rollouts] == [0.0] * 3
    assert "with the rubric stem: 'correct', 1 valid of 1 votes" in rollouts[0].notes[0]
    assert 'rollout_judge_judgments_total{outcome="cached",rubric="stem"} 2.0' in metrics
    assert 'rollout_judge_tokens_total{kind="prompt",rubric="stem"}' in metrics


async def test_a_judge_without_a_verdict_fails_the_evaluation(tmp_path: Path) -> None:
    async with judged_by(tmp_path, "It is hard to say.") as (service, _):
        rollout = await run(service, "r")
    assert (rollout.state, rollout.reward) == (RolloutState.FAILED, None)
    assert rollout.error is not None
    assert (rollout.error.code, rollout.error.stage) == ("no_verdict", Stage.EVALUATE)
    assert "It is hard to say." in rollout.error.message


async def test_without_a_pool_for_the_judge_the_error_says_how_to_register_one(tmp_path: Path) -> None:
    with anyio.fail_after(120):
        async with (
            scripted(r"\boxed{H_2}") as policy,
            gateway_service(tmp_path, [policy], pipeline=ONCE) as service,
        ):
            rollout = await run(service, "r")
    assert rollout.error is not None
    assert (rollout.reward, rollout.error.code) == (None, "no_backend")
    assert "'judge'" in rollout.error.message
    assert "POST /v1/backends" in rollout.error.hint
