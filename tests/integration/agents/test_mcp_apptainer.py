"""MCP servers run in the agent's sandbox, and pages come through its list of hosts."""

import shutil
from pathlib import Path

import pytest

from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS
from rollout_service.agents.tool_calling.tools import ToolContext, ToolInputError, by_name
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import SandboxSpec
from tests.support import mcp_server
from tests.support.web_server import web_server

pytestmark = pytest.mark.apptainer

TOML = """
name = "adding"
image = "base"
prompt = "Add."
tools = ["bash", "finish"]
[init]
command = "cp /environment/server.py /workspace/"
files = ["server.py"]
[[mcp]]
name = "notes"
command = ["python3", "server.py"]
tools = ["add", "where"]
[evaluate]
command = '''echo "{\\"reward\\": $(grep -l server[.]py /proc/[0-9]*/cmdline | wc -l)}" >"$ROLLOUT_RESULT"'''
sandbox = "same"
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "adding"
    folder.mkdir()
    (folder / "environment.toml").write_text(TOML)
    shutil.copy(Path(mcp_server.__file__), folder / "server.py")
    return folder


async def test_the_policy_has_their_tools_and_they_end_with_the_agent(folder, sandboxes):
    policy = ScriptedPolicy(
        [
            turn("", call("notes__add", a=40, b=2), call("notes__where")),
            turn("", call("bash", command="cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'server[.]py'")),
            turn("", call("finish", answer="42")),
        ]
    )
    trial = await play(load_folder(folder), {}, policy, sandboxes)
    assert [tool["function"]["name"] for tool in policy.tools] == [*("bash", "finish", "notes__add", "notes__where")]
    results = [message.content for message in policy.messages if message.role == "tool"]
    assert results[:2] == ["42", '{"cwd":"/workspace","given":null}']
    assert results[2] == "1"
    assert (trial.episode.answer, trial.score.reward) == ("42", 0.0)  # no server is left when it is scored


BROWSE = by_name(BUILTIN_TOOLS)["browse"]
SERVE = "cd /tmp && echo inside >page.txt && exec python3 -u -m http.server --bind 127.0.0.1 8123"


async def read(sandbox, url):
    return (await BROWSE({"url": url}, ToolContext(sandbox, 30.0, 4_000))).text


async def test_the_list_of_hosts_decides(provider):
    with (
        web_server(lambda asked: (200, {"content-type": "text/plain"}, asked.path.encode())) as listed,
        web_server(lambda _: (200, {}, b"unlisted")) as unlisted,
    ):
        async with await provider.start(SandboxSpec(network=(listed,))) as sandbox:
            assert await read(sandbox, f"http://{listed}/a?b=c") == "/a?b=c"
            with pytest.raises(ToolInputError, match="refused"):
                await read(sandbox, f"http://{unlisted}/")  # nothing listens there inside
            with pytest.raises(ToolInputError, match=r"host example\.net is not in the"):
                await read(sandbox, "https://example.net/")
            assert "host example.net is not in" in await read(sandbox, "http://example.net/")
            counts = await provider.egress_counts()
            assert (counts.allowed, counts.refused) == (1, {"host": 2})


async def test_a_server_inside_is_read_without_a_network(provider):
    with web_server(lambda _: (200, {}, b"the host's")) as address:
        async with await provider.start(SandboxSpec()) as sandbox:
            async with sandbox.program(["bash", "-c", SERVE]) as server:
                assert b"8123" in await server.receive()
                assert await read(sandbox, "http://localhost:8123/page.txt") == "inside"
            with pytest.raises(ToolInputError, match="refused"):
                await read(sandbox, f"http://{address}/")
            with pytest.raises(ToolInputError, match="has no network"):
                await read(sandbox, "http://192.0.2.1/")
