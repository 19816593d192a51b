"""A harness starts its program with the task, the gateway's address and a key, and says how the program ended."""

import asyncio
import json
import re
import socket
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from string import Template

import anyio
import pytest

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.harnesses import registry
from rollout_service.agents.harnesses.agent import LARGEST_ARGUMENT, HarnessAgent, with_servers
from rollout_service.agents.harnesses.preset import HarnessSettings
from rollout_service.agents.harnesses.registry import (
    get_harness,
    harness_image,
    harnesses,
    joint_image,
    read_preset,
)
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.engines.errors import NoBackendError
from rollout_service.environments.declarative.declaration import read_declaration
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import SandboxSpec
from tests.support.episodes import scripted_episode

ASK = "import os, sys, urllib.request; print(urllib.request.urlopen(os.environ['GATEWAY']).read().decode())"
ASKING = {"name": "command", "env": {"GATEWAY": "$url/$key"}}


class ScriptedGateway:
    """Answers each request with the policy's next turn."""

    url = "http://gateway.example"
    key = "rk-secret"

    def __init__(self, policy, stop_reason=None, failure=None):
        self.policy, self.stop_reason, self.failure = policy, stop_reason, failure
        self.paths = []

    @asynccontextmanager
    async def serve(self, listener: socket.socket) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._answer, sock=listener):
            yield

    async def _answer(self, reader, writer):
        self.paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        turn = await self.policy.respond([], max_tokens=1)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + turn.message.content.encode())
        await writer.drain()
        writer.close()

    async def until_failed(self):
        if self.failure is None:
            await anyio.sleep_forever()
        raise self.failure


@pytest.fixture
async def sandbox(provider):
    async with await provider.start(SandboxSpec(listens=True)) as started:
        yield started


def episode(sandbox, *, answers=("hello",), limits=None, **gateway):
    policy = ScriptedPolicy(answers)
    gateway = ScriptedGateway(policy, **gateway)
    return scripted_episode(policy=policy, limits=limits or {}, sandbox=sandbox, gateway=gateway)


def asked(text="Do it."):
    return [Message(role="user", content=text)]


def harness(*command, **more):
    return HarnessAgent(HarnessSettings(**{**ASKING, **more}, command=list(command)))


@pytest.mark.slow
async def test_the_program_gets_the_task_and_reaches_the_gateway(sandbox):
    agent = harness("python3", "-c", ASK + "; print(sys.argv[1:])", "--task", "$prompt")
    task = "Say '$key' \"; exit 1; # $(id)\nand more"
    found = episode(sandbox)
    await agent.prepare(found)
    assert await agent.run(found, asked(task)) is StopReason.FINISHED
    assert found.gateway.paths == ["/rk-secret"]
    assert found.answer == "hello"
    assert found.program.exit_code == 0
    assert found.program.output == f"hello\n{['--task', task]}"


@pytest.mark.slow
async def test_files_and_input_are_filled_in(sandbox):
    agent = harness(
        "bash", "-c", "cat ~/.agent/config; cat; python3 -c \"$$1\" >/dev/null", "-", ASK,
        files={"~/.agent/config": "$url/v1 $model $$\n"}, stdin="$prompt", model="my/model",
    )  # fmt: skip
    found = episode(sandbox)
    assert await agent.run(found, asked("from stdin")) is StopReason.FINISHED
    config, read = found.program.output.splitlines()
    assert config.startswith("http://127.0.0.1:")
    assert config.endswith("/v1 my/model $")
    assert read == "from stdin"


async def test_a_program_that_fails_after_its_calls_is_scored(sandbox):
    found = episode(sandbox)
    agent = harness("python3", "-c", ASK + "; sys.exit('broken')")
    assert await agent.run(found, asked()) is StopReason.EXITED
    assert found.program.exit_code == 1
    assert found.program.output == "hello\nbroken"


async def test_a_program_without_a_call_is_a_failure(sandbox):
    with pytest.raises(EnvironmentFailedError, match=r"exit code 3 and asked the model nothing.*no key") as caught:
        await harness("bash", "-c", "echo no key; exit 3").run(episode(sandbox), asked())
    assert "harness check command" in caught.value.hint


@pytest.mark.slow
async def test_a_program_that_does_not_end_is_ended(sandbox):
    found = episode(sandbox, limits={"agent_seconds": 2.0})
    agent = harness("python3", "-c", ASK + "; import time; time.sleep(600)")
    assert await agent.run(found, asked()) is StopReason.AGENT_TIMEOUT
    assert found.program.exit_code is None


@pytest.mark.slow
async def test_a_limit_that_calls_reached_is_the_reason(sandbox):
    found = episode(sandbox, stop_reason=StopReason.MAX_TURNS)
    assert await harness("python3", "-c", ASK).run(found, asked()) is StopReason.MAX_TURNS


async def test_a_call_without_an_answer_fails_the_rollout(sandbox):
    found = episode(sandbox, failure=NoBackendError("no engine"))
    with pytest.raises(NoBackendError):
        await harness("sleep", "600").run(found, asked())


async def test_a_missing_program_names_the_image_to_build(sandbox):
    with pytest.raises(EnvironmentFailedError, match="no program 'codex-of-nowhere'") as caught:
        await HarnessAgent(HarnessSettings(name="codex", command=["codex-of-nowhere"])).prepare(episode(sandbox))
    assert "image build codex" in caught.value.hint


async def test_another_version_than_asked_for_is_refused(sandbox):
    preset = get_harness("codex")
    agent = HarnessAgent(HarnessSettings(name="codex", command=["bash"], version="0.1"))
    agent._preset = preset.model_copy(update={"command": ["bash"], "version_command": ["echo", "codex 0.2"]})
    with pytest.raises(EnvironmentFailedError, match=r"another version than 0\.1 of codex: codex 0\.2"):
        await agent.prepare(episode(sandbox))


async def test_a_prompt_that_is_too_long_for_an_argument_is_refused():
    for agent in (harness("agent", "$prompt"), harness("agent", env={"TASK": "$prompt"})):
        agent.check(asked("x" * LARGEST_ARGUMENT))
        for text in ("x" * (LARGEST_ARGUMENT + 1), "a\0b"):
            with pytest.raises(InvalidFieldError):
                agent.check(asked(text))
    harness("agent", stdin="$prompt").check(asked("x" * (LARGEST_ARGUMENT + 1)))


@pytest.mark.parametrize("preset", harnesses(), ids=lambda preset: preset.name)
async def test_each_preset_is_whole(preset):
    assert preset.title
    if preset.name == "command":
        return
    HarnessAgent(HarnessSettings(name=preset.name))
    told = " ".join([*preset.command, *preset.env.values(), *preset.files.values(), preset.stdin or ""])
    assert all(f"${name}" in told for name in ("prompt", "url", "key", "model"))
    image = harness_image(preset.image)
    assert any(preset.version in value for value in image.arguments.values())


async def test_one_image_can_have_the_programs_of_several_harnesses(monkeypatch):
    image = joint_image(["claude_code", "opencode", "mini_swe_agent"], {"SUITE": "trixie"})
    both = [get_harness(name).install for name in ("claude_code", "opencode")]
    assert image.path == harness_image("codex").path
    assert image.arguments["NPM_PACKAGES"].split() == [*both[0].npm, *both[1].npm]
    assert image.arguments["NPM_SCRIPTS"].split() == [*both[0].scripts, *both[1].scripts]
    assert image.arguments["PYTHON_PACKAGES"].split() == get_harness("mini_swe_agent").install.pip
    assert image.arguments["SUITE"] == "trixie"
    assert joint_image(["codex", "openhands_sdk"]).arguments["SUITE"] == get_harness("openhands_sdk").install.suite
    with pytest.raises(ConfigurationError, match="'command' names nothing to install"):
        joint_image(["codex", "command"])
    codex = get_harness("codex")
    older = codex.model_copy(update={"install": codex.install.model_copy(update={"suite": "bookworm"})})
    found = {"codex": older, "openhands_sdk": get_harness("openhands_sdk")}
    monkeypatch.setattr(registry, "get_harness", found.__getitem__)
    with pytest.raises(ConfigurationError, match="different releases of Debian: bookworm, trixie"):
        joint_image(["codex", "openhands_sdk"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "mine"\ntitle = "Mine"\ncommand = ["$pormpt"]', r"there is no \$pormpt"),
        ('name = "mine"\ntitle = "Mine"\ncommand = ["costs $5"]', r"write \$\$ for a dollar sign"),
        ('name = "mine"\ntitle = "Mine"\n[files]\n"../x" = ""', "neither absolute nor below"),
        ('name = "mine"\ntitle = "Mine"\ncomand = ["x"]', "did you mean command"),
        ('name = "other"\ntitle = "Mine"', "its name is 'other'"),
        ("name = ", "cannot be read"),
    ],
)
async def test_a_wrong_preset_says_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_preset(path)


DECLARATION = """
name = "task"
{more}
[evaluate]
command = "true"
"""


async def test_an_environment_names_its_harness(tmp_path):
    spec = read_declaration(DECLARATION.format(more='harness = "codex"'), where="x").spec(tmp_path)
    assert (spec.harness.name, spec.image, spec.tools) == ("codex", "codex", [])
    more = '[harness]\nname = "codex"\nmodel = "m"\n'
    spec = read_declaration(DECLARATION.format(more=f'image = "own"\n{more}'), where="x").spec(tmp_path)
    assert (spec.harness.model, spec.image) == ("m", "own")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('harness = "codx"\nimage = "base"', "there is no harness 'codx'; did you mean codex?"),
        ('harness = "command"\nimage = "base"', "has no command"),
        ('harness = "codex"\ntools = ["bash"]', "tools and the harness"),
        ('harness = "codex"\nsystem = "Be good."', "a system prompt and the harness"),
        ("", "the key image is missing"),
    ],
)
async def test_a_harness_that_cannot_be_is_refused(tmp_path, more, said):
    (tmp_path / "environment.toml").write_text(DECLARATION.format(more=more))
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load_folder(tmp_path)


SERVERS = [
    McpSettings(name="notes", command=["python3", "a $b.py", 'say "x"\x7f'], env={"A": "5$"}, call_seconds=2.5),
    McpSettings(name="far", url="https://mcp.example.com/$x", headers={"authorization": "Bearer a$b"}),
]


def written(harness, servers=SERVERS):
    """Return the text of the settings that name the servers, as the program reads it, and its command."""
    preset = with_servers(get_harness(harness), servers)
    values = dict.fromkeys(("prompt", "url", "key", "model", "workdir"), "V")
    return Template(preset.files[preset.mcp.file]).substitute(values), preset.command


def test_codex_reads_servers_from_its_toml():
    servers = tomllib.loads(written("codex")[0])["mcp_servers"]
    assert servers == {
        "notes": {
            "command": "python3",
            "args": ["a $b.py", 'say "x"\x7f'],
            "env": {"A": "5$"},
            "startup_timeout_sec": 30.0,
            "tool_timeout_sec": 2.5,
        },
        "far": {
            "url": "https://mcp.example.com/$x",
            "http_headers": {"authorization": "Bearer a$b"},
            "startup_timeout_sec": 30.0,
        },
    }


@pytest.mark.parametrize(
    ("harness", "key", "notes", "far"),
    [
        ("claude_code", "mcpServers", {"type": "stdio"}, {"type": "http"}),
        ("qwen_code", "mcpServers", {"timeout": 2500}, {"httpUrl": "https://mcp.example.com/$x"}),
        ("gemini_cli", "mcpServers", {"timeout": 2500}, {"trust": True}),
        ("opencode", "mcp", {"type": "local", "environment": {"A": "5$"}}, {"type": "remote"}),
    ],
)
def test_programs_read_servers_from_their_json(harness, key, notes, far):
    text, command = written(harness)
    settings, before = json.loads(text), get_harness(harness)
    assert settings[key]["notes"].items() >= notes.items()
    assert settings[key]["far"].items() >= far.items()
    assert settings[key]["far"]["headers"] == {"authorization": "Bearer a$b"}
    assert settings.keys() - {key} == json.loads(before.files.get(before.mcp.file, "{}")).keys()
    assert command == [command[0], *before.mcp.arguments, *before.command[1:]]


def test_servers_that_a_program_cannot_take_are_refused():
    with pytest.raises(ConfigurationError, match="the harness 'mini_swe_agent' takes no servers"):
        with_servers(get_harness("mini_swe_agent"), SERVERS)
    with pytest.raises(ConfigurationError, match="offers all tools of the server 'notes'"):
        with_servers(get_harness("codex"), [SERVERS[0].model_copy(update={"tools": ["add"]})])
    assert with_servers(get_harness("codex"), []) == get_harness("codex")


@pytest.mark.parametrize("text", ["{} // mine", "[1]", '{"mcpServers": []}'])
def test_a_settings_file_to_which_no_server_can_be_added_is_named(text):
    preset = get_harness("gemini_cli").model_copy(update={"files": {"~/.gemini/settings.json": text}})
    with pytest.raises(ConfigurationError, match=r"the file '~/\.gemini/settings\.json' of \[harness\]"):
        with_servers(preset, SERVERS)


def test_servers_of_the_settings_file_stay():
    text = '{"mcpServers": {"mine": {"command": "mine"}}}'
    preset = get_harness("gemini_cli").model_copy(update={"files": {"~/.gemini/settings.json": text}})
    files = with_servers(preset, SERVERS).files
    assert set(json.loads(files["~/.gemini/settings.json"])["mcpServers"]) == {"mine", "notes", "far"}
