"""OpenEnv's own client drives this project's environments, and sandboxes end with its sessions."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import httpx
import pytest
from typer.testing import CliRunner

from rollout_service.authoring.openenv_server import EnvironmentServer
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.cli import app
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.bridges.openenv import OpenEnv, OpenEnvDeclaration
from rollout_service.environments.bridges.openenv_session import OpenEnvServer, OpenEnvServerError
from rollout_service.environments.builtin.calc import environment as calc
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import SandboxProvider
from tests.support.openenv.process import RealOpenEnv

pytestmark = [pytest.mark.bridges, pytest.mark.xdist_group("openenv")]
TASKS: list[dict[str, Any]] = [
    {"question": "Write 7 to the file seven.", "answer": "7\n"},
    {"question": "Write 8 to the file seven.", "answer": "8\n"},
]


class Files(AgentEnvironment):
    """The agent writes a file, which is read in its own sandbox."""

    def __init__(self, limits: EpisodeLimits = EpisodeLimits()) -> None:  # noqa: B008 - it is frozen
        spec = EnvironmentSpec(
            name="files", image="base", tools=["bash", "finish"], evaluate_in=EvaluateIn.SAME, limits=limits
        )
        super().__init__(spec)

    async def evaluate(self, episode: Episode) -> Score:
        wanted = str(episode.instance["answer"])
        if wanted == "broken":
            raise EnvironmentFailedError("the grader broke", hint="Mend it.")
        found = await episode.require_sandbox().exec(["cat", "seven"])
        return Score(float(found.stdout.decode() == wanted), {"bytes": float(len(found.stdout))})

    def dataset(self) -> list[dict[str, Any]]:
        return TASKS


class Lacking(Files):
    def check(self, instance: dict[str, Any]) -> None:
        raise ConfigurationError("a library is not installed")


def served(environment: Environment, provider: SandboxProvider, sessions: int = 1) -> Any:
    server = EnvironmentServer(environment, environment.dataset(), SandboxSource(provider), sessions)
    return server.listening("127.0.0.1", 0)


async def real_play(real: RealOpenEnv, url: str, reset: dict[str, Any], *actions: dict[str, Any]) -> dict[str, Any]:
    return await anyio.to_thread.run_sync(lambda: real.play(url, reset, *actions))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with aiohttp.ClientSession() as client, client.ws_connect(f"{url}/ws") as socket:
        yield socket


async def until_none(provider: SandboxProvider) -> None:
    with anyio.fail_after(30):
        while provider.live():
            await anyio.sleep(0.02)


def act(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


async def test_openenvs_own_client_gets_the_reward_of_a_rollout(real, provider):
    command = "echo 8 > seven; echo done"
    script = [turn("", call("bash", command=command)), "Written."]
    expected = await play(Files(), dict(TASKS[1]), ScriptedPolicy(script), SandboxSource(provider))
    async with served(Files(), provider) as url:
        played = await real_play(real, url, {"index": 1}, act("bash", command=command), {"text": "Written."})
        assert provider.live() == []
    assert played["rewards"] == [None, expected.score.reward] == [None, 1.0]
    assert played["done"]
    first, (tool_result, last) = played["first"], played["observations"]
    assert first["messages"] == [{"role": "user", "content": TASKS[1]["question"]}]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["bash", "finish"]
    assert tool_result["messages"] == [{"role": "tool", "content": "done"}]
    assert last["metadata"]["reward_parts"] == {"bytes": 2.0}
    assert last["metadata"]["stop_reason"] == expected.stop_reason.value


async def test_a_seed_and_an_instance_choose_the_task(real, provider):
    async with served(calc, provider) as url:
        dataset = calc.dataset()
        seeded = await real_play(real, url, {"seed": len(dataset) + 2})
        given = await real_play(
            real, url, {"instance": {"question": "What is 6*7?", "answer": "42"}}, {"text": r"\boxed{42}"}
        )
    assert str(dataset[2]["question"]) in seeded["first"]["messages"][-1]["content"]
    assert given["rewards"] == [1.0]


@pytest.mark.parametrize(
    ("reset", "action", "why"),
    [
        ({"index": 9}, {}, "there are 2 tasks"),
        ({"split": "test"}, {}, "split"),
        ({"level": 1}, {}, "level"),
        ({"instance": {"answer": "7"}}, {}, "question"),
        ({}, {"words": "x"}, "words"),
        ({}, {"tool_calls": [{"arguments": {}}]}, "name"),
    ],
)
async def test_bad_input_is_a_validation_error(real, provider, reset, action, why):
    async with served(Files(), provider) as url:
        played = await real_play(real, url, reset, action)
        assert "VALIDATION_ERROR" in played["error"]
        assert why in played["error"]


async def test_a_grader_that_fails_is_an_error_and_no_reward(real, provider):
    async with served(Files(), provider) as url:
        broken = {"instance": {"question": "?", "answer": "broken"}}
        played = await real_play(real, url, broken, {"text": "Done."})
    assert "EXECUTION_ERROR" in played["error"]
    assert "the grader broke" in played["error"]


async def test_the_bridge_plays_a_served_environment(provider):
    async with served(Files(), provider) as url:
        bridge = OpenEnv(OpenEnvDeclaration(name="served", url=url))
        script = [
            turn("", call("act", **act("bash", command="echo 7 > seven"))),
            turn("", call("act", text="x")),
        ]
        trial = await play(bridge, {"seed": 0}, ScriptedPolicy(script), SandboxSource(provider))
    assert trial.score.reward == 1.0
    assert trial.score.parts["finished"] == 1.0


async def test_a_client_that_leaves_in_the_middle_of_a_step_leaves_no_sandbox(provider):
    async with served(Files(), provider) as url:
        async with connected(url) as socket:
            await socket.send_json({"type": "reset", "data": {}})
            assert (await socket.receive_json())["type"] == "observation"
            assert len(provider.live()) == 1
            await socket.send_json({"type": "step", "data": act("bash", command="sleep 600")})
        await until_none(provider)


async def test_a_reset_ends_the_episode_before_it(provider):
    async with served(Files(), provider) as url, OpenEnvServer(url, {}).session() as session:
        await session.reset({"index": 0}, 30)
        (before,) = provider.live()
        await session.reset({"index": 1}, 30)
        (after,) = provider.live()
        assert before != after


async def test_sessions_are_limited(provider):
    async with served(Files(), provider) as url, OpenEnvServer(url, {}).session() as session:
        await session.reset({}, 30)
        async with OpenEnvServer(url, {}).session() as second:
            with pytest.raises(OpenEnvServerError, match="all 1 sessions are taken"):
                await second.reset({}, 30)


async def test_sessions_end_with_the_server(provider):
    async with aiohttp.ClientSession() as client:
        async with served(Files(), provider) as url:
            socket = await client.ws_connect(f"{url}/ws")
            await socket.send_json({"type": "reset", "data": {}})
            await socket.receive_json()
            assert len(provider.live()) == 1
        assert provider.live() == []
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_a_limit_that_passes_between_steps_ends_the_episode_with_its_reward(provider):
    environment = Files(EpisodeLimits(agent_seconds=0.2))
    async with served(environment, provider) as url, connected(url) as socket:
        await socket.send_json({"type": "reset", "data": {}})
        await socket.receive_json()
        await until_none(provider)
        replies = []
        for _ in range(2):
            await socket.send_json({"type": "step", "data": {"text": "late"}})
            replies.append(await socket.receive_json())
    assert replies[0]["data"]["done"]
    assert replies[0]["data"]["metadata"]["stop_reason"] == "agent_timeout"
    assert replies[1]["data"]["code"] == "EXECUTION_ERROR"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "INVALID_JSON"),
        pytest.param("[" * 100_000, "INVALID_JSON", id="deep"),
        ("[]", "UNKNOWN_TYPE"),
        ('{"type": "mcp"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {}}', "EXECUTION_ERROR"),
        ('{"type": "step", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "reset"}', "EXECUTION_ERROR"),
    ],
)
async def test_messages_that_fail_are_errors_and_the_session_lives_on(provider, text, code):
    async with served(Lacking(), provider) as url, connected(url) as socket:
        await socket.send_str(text)
        assert (await socket.receive_json())["data"]["code"] == code
        await socket.send_json({"type": "state"})
        assert (await socket.receive_json()) == {"type": "state", "data": {}}


async def test_pages_describe_the_environment_and_web_pages_are_refused(provider):
    async with served(Files(), provider) as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/metadata") as response:
            assert (await response.json())["name"] == "files"
        async with client.get(f"{url}/health") as response:
            assert await response.json() == {"status": "healthy"}
        assert set((await OpenEnvServer(url, {}).action_schema())["properties"]) >= {"text", "tool_calls"}
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await client.ws_connect(f"{url}/ws", origin="http://example.org")


async def test_what_cannot_be_served_is_refused(provider):
    environment = Files()
    environment.uses_gateway = True
    with pytest.raises(ConfigurationError, match="a program of its own"):
        served(environment, provider)
    async with served(Files(), provider) as url:
        port = int(url.rpartition(":")[2])
        server = EnvironmentServer(Files(), [], SandboxSource(provider), 1)
        with pytest.raises(ConfigurationError, match="cannot listen"):
            async with server.listening("127.0.0.1", port):
                pass


def test_the_command_serves_until_it_is_ended():
    command = ["rollout-service", "env", "serve", "calc", "--port", "0"]
    environ = os.environ | {"ROLLOUT_SANDBOX__PROVIDER": "local"}
    with subprocess.Popen(
        [Path(sys.executable).with_name(command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        try:
            url = next(line for line in process.stdout if line.startswith("http://")).strip()
            assert httpx.get(f"{url}/metadata").json()["name"] == "calc"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_the_command_listens_beyond_loopback_only_if_told_that_anybody_may_connect():
    command = ["env", "serve", "calc", "--port", "0", "--host", "0.0.0.0"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "beyond loopback" in result.stderr
    assert "--without-key" in result.stderr
