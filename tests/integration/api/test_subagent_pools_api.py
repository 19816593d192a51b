"""Tasks whose sub-agents have no pool are refused with the way to get one; a pool that is lost later is waited for."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.runs import FileTasks, InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_client.errors import InvalidRequestError
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine
from sandboxes.host.ports import free_port
from tests.support.turns import handed_on

MODEL = policy_folder("calc-tuned")
ENVIRONMENT = """
name = "team"
image = "base"
prompt = "Add {{ instance.numbers }}."
[parallel.subagent]
pool = "frozen-1"
needs_tool_call = false
[evaluate]
command = "echo '{\\"reward\\": 1.0}' > $ROLLOUT_RESULT"
"""
TASK = Task(environment="team", instance={"numbers": "1 2", "sum": "3"})


TURNS = [handed_on("1 2", system="Add."), "3<|im_end|>"]


def engine(*turns: str, port: int = 0) -> ScriptedEngine:
    return ScriptedEngine(Replies.from_texts(turns, MODEL), model_path=MODEL, port=port)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[RolloutClient]:
    """Serve the policy alone."""
    (folder / "team").mkdir()
    (folder / "team" / "environment.toml").write_text(ENVIRONMENT)
    (folder / "rollout.toml").write_text("")
    flags = ["--config", str(folder / "rollout.toml"), "--sandbox", "local", "--engine", "none"]
    flags += ["--environment", str(folder / "team")]
    async with engine(*TURNS) as policy, running_server(folder, [*flags, "--backend", policy.url]) as client:
        yield client


async def test_a_task_whose_sub_agents_have_no_pool(tmp_path):
    async with served(tmp_path) as client, engine("<result>3</result><|im_end|>") as frozen:
        await refused_as_long_as_nobody_serves_them(client, tmp_path)
        await client.add_backend(BackendSpec(url=HttpUrl(frozen.url), pool="frozen-1"))
        await refused_in_the_pool_of_the_sub_agents(client)
        rollout = await client.run(RolloutRequest(task=TASK))
        assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, 1.0)
        assert frozen.requests == 2, "one at the registration, one of the sub-agent"
        run = await client.create_run(RunRequest(source=InlineTasks(tasks=[TASK]), batch_size=1))
        await run.end()


async def refused_as_long_as_nobody_serves_them(client: RolloutClient, folder: Path) -> None:
    await refused(client.submit(RolloutRequest(task=TASK)), "body.task.environment")
    inline = RunRequest(source=InlineTasks(tasks=[TASK]), batch_size=1)
    await refused(client.create_run(inline), "body.source.tasks.0.environment")
    (folder / "tasks.jsonl").write_text(json.dumps(TASK.instance))
    source = FileTasks(path=str(folder / "tasks.jsonl"), environment="team")
    await refused(client.create_run(RunRequest(source=source, batch_size=1)), "body.source.environment")
    assert (await client.page()).counts == {}
    assert await client.runs() == []
    assert (await client.readiness()).warnings == [], "an environment that nobody uses is no problem"


async def refused(request, path: str) -> None:
    with pytest.raises(InvalidRequestError, match="'frozen-1', which has no backend") as caught:
        await request
    problem = caught.value.problem
    assert problem.status == 422
    assert [error.path for error in problem.errors] == [path]
    assert 'POST /v1/backends {"url":"http://host:30000","pool":"frozen-1"}' in problem.detail


async def refused_in_the_pool_of_the_sub_agents(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequestError, match="serves the sub-agents of environment 'team'") as caught:
        await client.submit(RolloutRequest(task=TASK, pool="frozen-1"))
    assert [error.path for error in caught.value.problem.errors] == ["body.pool"]


async def test_rollouts_wait_for_a_pool_of_sub_agents_that_was_lost(tmp_path):
    port, turn = free_port(), "<result>3</result><|im_end|>"
    async with served(tmp_path) as client:
        async with engine(turn, port=port) as frozen:
            await client.add_backend(BackendSpec(url=HttpUrl(frozen.url), pool="frozen-1"))
        with anyio.fail_after(30):
            while not (warnings := (await client.readiness()).warnings):
                await anyio.sleep(0.05)
        assert "team wait: no backend of pool 'frozen-1'" in warnings[0]
        assert (await client.readiness()).ready, "other rollouts begin"
        waiting = [await client.submit(RolloutRequest(task=TASK)) for _ in range(4)]
        calc = Task(environment="calc", instance=(await client.dataset("calc", limit=1))[0])
        await client.run(RolloutRequest(task=calc))
        assert (await client.page(state=RolloutState.QUEUED)).counts[RolloutState.QUEUED] == 4
        async with engine(turn, port=port):
            ended = [await result(client, each) for each in waiting]
        assert {(each.state, each.reward, each.attempt) for each in ended} == {(RolloutState.COMPLETED, 1.0, 1)}
        assert not any(each.retries for each in ended)
        async with httpx.AsyncClient(base_url=client.base_url) as http:
            metrics = (await http.get("/metrics")).text
        assert 'rollout_frozen_version_changes_total{pool="frozen-1"} 0.0' in metrics


async def result(client: RolloutClient, rollout: Rollout) -> Rollout:
    with anyio.fail_after(60):
        return await client.wait(rollout.rollout_id)
