"""What rollouts did and waited for, from a running service: tools, sub-agents, programs outside, runs, refusals."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import HttpUrl

from api_schemas.external import RolloutAccess
from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import RolloutStep, RolloutSteps, StepKind
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_client.client import InvalidRequestError, NotFoundError
from tests.support.gateway.service import CALC, GatewayService, gateway_service, scripted
from tests.support.turns import called
from tests.support.waiting import until

K = StepKind
ENVIRONMENT = """
name = "shell"
image = "base"
tools = ["bash", "read", "finish"]

[evaluate]
command = "true"
sandbox = "same"
"""
TEAM = """
name = "team"
image = "base"
tools = ["bash", "finish"]

[parallel.subagent]
tools = ["bash"]

[evaluate]
command = "true"
sandbox = "same"
"""


@asynccontextmanager
async def serving(folder: Path, *texts: str, toml: str = ENVIRONMENT) -> AsyncIterator[GatewayService]:
    environment = folder / "environment"
    environment.mkdir()
    (environment / "environment.toml").write_text(toml)
    async with (
        scripted(*texts) as engine,
        gateway_service(folder / "state", [engine], environments=[environment]) as service,
    ):
        yield service


async def run(service: GatewayService, environment: str = "shell") -> RolloutSteps:
    task = Task(environment=environment, instance={"question": "Work."})
    await service.client.submit(RolloutRequest(rollout_id="r", task=task))
    rollout = await service.client.wait("r", timeout_seconds=60)
    assert rollout.state in (RolloutState.COMPLETED, RolloutState.FAILED)
    return await service.client.steps("r")


def of_kind(found: RolloutSteps, kind: StepKind) -> list[RolloutStep]:
    return [step for step in found.steps if step.kind is kind]


def assert_nested(found: RolloutSteps) -> None:
    """Check that of two steps of a lane one is over before the other, or contains it."""
    by_lane = sorted(found.steps, key=lambda step: (step.lane, step.started_at))
    for _, lane in groupby(by_lane, key=lambda step: step.lane):
        spans = [(one.started_at.timestamp(), one.started_at.timestamp() + one.seconds) for one in lane]
        for number, (begin, end) in enumerate(spans):
            for other_begin, other_end in spans[number + 1 :]:
                assert other_begin >= end - 1e-5 or other_end <= end + 1e-5, (
                    begin,
                    end,
                    other_begin,
                    other_end,
                )


async def test_the_steps_of_an_agent_with_tools(tmp_path):
    both = "\n".join(called("read", path=f"missing-{name}") for name in "ab")
    texts = [called("bash", command="echo one\necho two"), both, called("finish", answer="done")]
    with anyio.fail_after(90):
        async with serving(tmp_path, *texts) as service:
            found = await run(service)
    assert [step.started_at for step in found.steps] == sorted(step.started_at for step in found.steps)
    assert_nested(found)
    engine = of_kind(found, K.ENGINE)
    assert [step.detail["turn"] for step in engine] == [0, 1, 2]
    assert {step.detail["segment"] for step in engine} == {0}
    assert all(re.fullmatch(r"[0-9a-f]{32}-0000", str(step.detail["request"])) for step in engine)
    assert all(step.detail["tokens"] and step.detail["version"] == 0 for step in engine)
    assert all(one.detail["prompt_tokens"] < two.detail["prompt_tokens"] for one, two in pairwise(engine))  # type: ignore[operator]
    bash, *reads, finish = of_kind(found, K.TOOL)
    assert (bash.name, bash.lane, bash.detail["command"]) == ("bash", "", "echo one")
    assert [(step.name, step.lane == step.detail["call"]) for step in reads] == [("read", True)] * 2
    assert (finish.name, finish.lane) == ("finish", "")
    [start] = of_kind(found, K.SANDBOX_START)
    assert start.detail["sandbox"] == bash.detail["sandbox"]
    assert [step.detail for step in of_kind(found, K.SANDBOX_END)] == [{"sandbox": bash.detail["sandbox"]}]
    [session] = of_kind(found, K.SESSION)
    assert session.lane == "sessions"
    assert {step.stage for step in engine} == {Stage.ROLLOUT}
    assert of_kind(found, K.GRADER)
    assert of_kind(found, K.STORE)


async def test_sub_agents_have_lanes_of_their_own(tmp_path):
    created = called("create_subagent", name="worker", system_prompt="You look things up.")
    assigned = [called("assign_task", agent="worker", prompt=f"Task {number}") for number in range(2)]
    texts = ["\n".join([created, *assigned]), called("finish", answer="done")]
    with anyio.fail_after(90):
        async with serving(tmp_path, *texts, toml=TEAM) as service:
            frozen = scripted(*[called("bash", command="ls"), "<result>7</result>"] * 2)
            async with frozen:
                await service.client.add_backend(BackendSpec(url=HttpUrl(frozen.url), pool="frozen-1"))
                found = await run(service, "team")
    assert_nested(found)
    slots = of_kind(found, K.SUBAGENT)
    assert sorted((step.name, step.lane) for step in slots) == [("worker", "1"), ("worker", "2")]
    assert {step.lane for step in of_kind(found, K.ENGINE)} == {"", "1", "2"}
    assert {step.lane for step in of_kind(found, K.TOOL)} >= {"1", "2"}


async def ask(access: RolloutAccess, text: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {access.key}"}
    async with httpx.AsyncClient(base_url=access.url, headers=headers, timeout=30) as http:
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()


async def test_a_program_outside_is_an_agent_whose_calls_may_overlap(tmp_path):
    with anyio.fail_after(90):
        async with (
            scripted("One.", "Two.", "Three.", latency=0.2) as engine,
            gateway_service(tmp_path, [engine]) as service,
        ):
            access = await service.begin()
            async with anyio.create_task_group() as tasks:
                for text in ("a", "b", "c"):
                    tasks.start_soon(ask, access, text)
            live = await service.client.steps("r")
            await service.end(reward=1.0)
            await service.client.wait("r", timeout_seconds=30)
            found = await service.client.steps("r")
    assert_nested(found)
    assert sorted(str(step.detail["turn"]) for step in of_kind(live, K.ENGINE)) == ["0", "1", "2"]
    assert of_kind(live, K.AGENT) == [], "it has not ended"
    [agent] = of_kind(found, K.AGENT)
    assert agent.name == "external"
    lanes = {step.lane for step in of_kind(found, K.ENGINE)}
    assert "" in lanes
    assert lanes <= {"", "model call 2", "model call 3"}


async def ended(service: GatewayService, rollout_id: str) -> bool:
    try:
        return (await service.client.get(rollout_id)).state.terminal
    except NotFoundError:
        return False


async def test_the_steps_of_a_run_are_read_at_once(tmp_path):
    request = RunRequest(run_id="run", source=InlineTasks(tasks=[CALC, CALC]), group_size=2, batch_size=1)
    with anyio.fail_after(90):
        async with scripted("2", "2", "2", "2") as engine, gateway_service(tmp_path, [engine]) as service:
            await service.client.create_run(request)
            for name in ("run.0.0", "run.0.1", "run.1.0", "run.1.1"):
                await until(partial(ended, service, name))
            found = [one async for one in service.client.run_steps("run")]
            lines = [one async for one in service.client.step_lines(rollouts=["run.0.1", "run.1.0", "nobody"])]
            with pytest.raises(NotFoundError):
                [one async for one in service.client.run_steps("nobody")]
    assert sorted(one.rollout_id for one in found) == ["run.0.0", "run.0.1", "run.1.0", "run.1.1"]
    for one in found:
        [attempt] = one.attempts
        assert (attempt.run_id, attempt.attempt, attempt.outcome["state"]) == ("run", 1, "completed")
        assert one.rollout_id.startswith(f"run.{attempt.group}.")
        assert K.ENGINE in attempt.kinds
    assert [json.loads(line)["rollout_id"] for line in lines] == ["run.0.1", "run.1.0"]


async def test_what_cannot_be_read_is_refused(tmp_path):
    async with gateway_service(tmp_path, []) as service:
        with pytest.raises(NotFoundError, match="nobody"):
            await service.client.steps("nobody")
        with pytest.raises(InvalidRequestError, match="name either a run or rollouts"):
            [one async for one in service.client.step_lines()]
