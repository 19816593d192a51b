"""Tools of MCP servers work over pipes and HTTP; a server that fails is a typed failure, whatever it sends."""

import json
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from api_schemas.trajectories import Message
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.mcp.tools import open_servers, result_text
from rollout_service.agents.mcp.transports import HttpTransport, McpServerError, _parse
from rollout_service.agents.parallel.settings import ParallelSettings, SubagentSettings
from rollout_service.agents.tool_calling.tools import ToolContext, ToolInputError
from rollout_service.base.errors import describe
from rollout_service.environments import agent_environment
from rollout_service.environments.contract import EnvironmentSpec
from tests.support import mcp_server
from tests.support.episodes import scripted_episode
from tests.support.web_server import web_server

SERVER = str(Path(mcp_server.__file__))


def stdio(name="notes", **settings):
    return McpSettings(name=name, command=[sys.executable, SERVER], **settings)


def script(code, **settings):
    return McpSettings(name="bad", command=[sys.executable, "-c", code], **settings)


@asynccontextmanager
async def opened(sandbox, *servers, agent_runs_code=False):
    async with open_servers(servers, sandbox, agent_runs_code=agent_runs_code) as tools:
        yield {tool.name: tool for tool in tools}


async def call(tool, seconds=20.0, output_chars=4_000, **arguments):
    return (await tool(arguments, ToolContext(None, seconds, output_chars))).text


async def test_tools_have_their_servers_name_and_schema(local_sandbox):
    async with opened(local_sandbox, stdio(), stdio("more", tools=["fail", "add"])) as tools:
        assert list(tools)[:2] == ["notes__add", "notes__picture"]
        assert list(tools)[-3:] == ["notes__odd_name", "more__fail", "more__add"]
        assert tools["notes__add"].definition["function"] == {
            "name": "notes__add",
            "description": "Add two numbers.",
            "parameters": mcp_server.SCHEMA,
        }
        assert await call(tools["notes__add"], a=2, b=3) == "5"
        assert await call(tools["more__add"], a=20, b=30) == "50"


async def test_results_become_text(local_sandbox):
    async with opened(local_sandbox, stdio(env={"GIVEN": "yes"})) as tools:
        assert await call(tools["notes__picture"]) == (
            "see:\n[a part was left out: image (image/png); only text can be shown]"
        )
        assert await call(tools["notes__fail"]) == "no such note\n[the tool reports an error]"
        assert json.loads(await call(tools["notes__where"])) == {"cwd": local_sandbox.workdir, "given": "yes"}
        failed = await tools["notes__fail"]({}, ToolContext(None, 20.0, 4_000))
        assert failed.failed
        said = await call(tools["notes__long"], output_chars=500)
        assert len(said) <= 500
        assert "characters cut" in said
        with pytest.raises(ToolInputError, match="wrong: 'b'"):
            await call(tools["notes__add"], a=1)


@pytest.mark.parametrize("content", [None, 3, [None, 4, {}, {"type": "text"}, {"type": "resource", "resource": 5}]])
def test_a_result_may_hold_anything(content):
    assert isinstance(result_text({"content": content}, 500), str)


@pytest.mark.parametrize(
    ("line", "text"),
    [(rb'{"a": "x\ud800\\ud800"}', "x\ufffd\\ud800"), (b'{"a": "x\xff"}', "x\ufffd"), (b'{"a": "\xff', None)],
)
def test_an_answer_with_characters_that_utf8_lacks_is_one(line, text):
    assert _parse(line) == (None if text is None else {"a": text})


def test_an_answer_that_is_nested_too_deep_to_be_shown_is_none():
    for value in (b'{"id":' * 500 + b"1" + b"}" * 500, b'{"id":' + b"[" * 1_000 + b"]" * 1_000 + b"}"):
        assert _parse(value) is None


def test_notes_on_many_parts_are_within_the_limit_too():
    parts = [{"type": "text", "text": "seen"}, *({"type": f"kind {number}"} for number in range(1_000))]
    text = result_text({"content": parts, "isError": True}, 400)
    assert len(text) <= 400
    assert text.startswith("seen\n[a part was left out: kind 0 ")
    assert text.endswith("\n[the tool reports an error]")


@pytest.mark.slow
async def test_a_slow_tool_is_stopped_and_a_server_that_answers_goes_on(local_sandbox):
    async with opened(local_sandbox, stdio(env={"SLEEP": "1"}, call_seconds=0.2)) as tools:
        assert await call(tools["notes__sleep"]) == "[stopped: it took longer than 0.2 s]"
        assert await call(tools["notes__add"], a=1, b=1) == "2"


async def test_a_server_that_dies_or_hangs_is_a_typed_failure(local_sandbox, monkeypatch):
    async with opened(local_sandbox, stdio()) as tools:
        with pytest.raises(McpServerError, match="has ended with exit code 7: out of notes") as caught:
            await call(tools["notes__die"])
        info = describe(caught.value)
        assert "env shell" in (info.hint or "")
        assert (info.code, info.boundary, info.retryable) == ("mcp_server_failed", "environment", True)
        with pytest.raises(McpServerError, match="has ended"):
            await call(tools["notes__add"], a=1, b=1)
    monkeypatch.setattr("rollout_service.agents.mcp.tools.PING_SECONDS", 0.1)
    async with opened(local_sandbox, stdio(env={"SLEEP": "600"})) as tools:
        with pytest.raises(McpServerError, match="nor a ping after it"):
            await call(tools["notes__sleep"], seconds=0.1)


async def test_an_agent_that_could_have_ended_the_server_only_reads_of_it(local_sandbox):
    async with opened(local_sandbox, stdio(), agent_runs_code=True) as tools:
        assert "has ended with exit code 7" in await call(tools["notes__die"])
        assert "has ended" in await call(tools["notes__add"], a=1, b=1)


class Delegating(agent_environment.AgentEnvironment):
    async def evaluate(self, episode):
        raise NotImplementedError


@pytest.mark.parametrize(("sandbox", "may_end"), [("shared", True), ("own", False)])
async def test_a_sub_agent_in_the_same_sandbox_could_have_ended_the_server_too(monkeypatch, sandbox, may_end):
    seen = []

    @asynccontextmanager
    async def servers(settings, sandbox, *, agent_runs_code):
        seen.append(agent_runs_code)
        yield []

    monkeypatch.setattr(agent_environment, "open_servers", servers)
    parallel = ParallelSettings(subagent=SubagentSettings(sandbox=sandbox, tools=["bash"]))
    spec = EnvironmentSpec(name="e", image="base", tools=["think"], mcp=[stdio()], parallel=parallel)
    episode = scripted_episode(["Done."], sandbox=object(), subagents=object())
    await Delegating(spec)._run_agent(episode, [Message(role="user", content="Do it.")])
    assert seen == [may_end]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no notes')", "has ended with exit code 1: no notes"),
        ("print('{}', flush=True); input(); input()", "was not ready within"),
        ("import time\nwhile True: print('x' * 999_999, end='')", "message of more than"),
        ('print(\'{"jsonrpc": "2.0", "id": 1, "result": {}}\', flush=True); input()', "names no version"),
        ('print(\'{"jsonrpc": "2.0", "id": 1, "result": 5}\', flush=True); input()', "neither a result"),
        ('print(\'{"id": 1, "error": {"message": "no"}}\', flush=True); input()', "refuses to begin: no"),
    ],
)
async def test_a_server_that_does_not_begin_is_a_typed_failure(local_sandbox, code, message):
    late = 1.0 if "ready" in message else 60.0
    with pytest.raises(McpServerError, match=message) as caught:
        async with opened(local_sandbox, script(code, start_seconds=late)):
            pytest.fail("it began")
    assert caught.value.retryable is ("ended" in message or "ready" in message)


async def test_a_server_without_a_program_is_not_tried_again(local_sandbox):
    with pytest.raises(McpServerError, match="exit code 127") as caught:
        async with opened(local_sandbox, McpSettings(name="none", command=["no-such-program"])):
            pytest.fail("it began")
    assert not caught.value.retryable


async def test_arguments_may_have_any_whole_number(local_sandbox):
    async with opened(local_sandbox, stdio()) as tools:
        assert await call(tools["notes__add"], a=10**30, b=1) == str(10**30 + 1)


async def test_tools_that_are_missing_or_double_are_refused(local_sandbox):
    with pytest.raises(McpServerError, match="has no tool 'ad'; did you mean add"):
        async with opened(local_sandbox, stdio(tools=["ad"])):
            pytest.fail("it began")
    with pytest.raises(McpServerError, match="would both be named 'notes__add'") as caught:
        async with opened(local_sandbox, stdio(tools=["add", "add"])):
            pytest.fail("it began")
    assert not caught.value.retryable


async def test_a_type_that_json_schema_does_not_have_is_refused_unless_the_tool_is_left_out(local_sandbox):
    schema = {"properties": {"type": {"items": [{"type": "integer"}]}, "to": {"type": ["str", "null"]}}}
    tools = [{"name": "fly", "inputSchema": schema}, {"name": "pair", "inputSchema": {"items": [{}, {}]}}]
    said = f"import tests.support.mcp_server as server\nserver.TOOLS = {tools}\nserver.main()"
    bad = script(said, env={"PYTHONPATH": str(Path(SERVER).parents[2])})
    with pytest.raises(McpServerError, match=r"'fly' .* says properties.to.type.0 is 'str', which is not") as caught:
        async with opened(local_sandbox, bad):
            pytest.fail("it began")
    assert "string" in caught.value.hint
    async with opened(local_sandbox, bad.model_copy(update={"tools": ["pair"]})) as left:
        assert list(left) == ["bad__pair"]


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_server_is_reached_over_http(local_sandbox, streamed):
    asked = []

    def page(sent):
        if not sent.body:
            return 200, {}, b""
        message = json.loads(sent.body)
        asked.append(message["method"])
        found = mcp_server.answer(message)
        if found is None:
            return 202, {}, b""
        data = json.dumps(found)
        if streamed:
            events = f'event: message\r\ndata: {{"method": "ping", "id": 9}}\r\n\r\ndata: {data}\r\n\r\n: more'
            return 200, {"content-type": "text/event-stream"}, events.encode()
        return 200, {"content-type": "application/json", "mcp-session-id": "s-1"}, data.encode()

    with web_server(page) as address:
        server = McpSettings(name="far", url=f"http://{address}/mcp", headers={"authorization": "Bearer k"})
        async with opened(local_sandbox, server, agent_runs_code=True) as tools:
            assert await call(tools["far__add"], a=2, b=2) == "4"
    assert asked == ["initialize", "notifications/initialized", *["tools/list"] * 3, "tools/call"]
    with pytest.raises(McpServerError, match="cannot be reached"):
        async with opened(local_sandbox, server):
            pytest.fail("it began")


class Trickle:
    """The body of an answer, a byte at a time."""

    status, headers = 200, [(b"content-type", b"text/event-stream")]

    def __init__(self, body):
        self.body = body

    async def aiter_stream(self):
        for byte in self.body:
            yield bytes([byte])


async def test_an_event_that_comes_byte_by_byte_is_read_in_linear_time():
    transport = HttpTransport(McpSettings(name="web", url="http://localhost:1/mcp"), None)
    events = b": " + 60_000 * b"x" + b'\r\n\r\ndata: {"id": 1,\r\ndata: "result": {}}\r\n\r\n'
    began = time.process_time()
    assert await transport._read(Trickle(events), 1) == {"id": 1, "result": {}}
    assert time.process_time() - began < 4, "looking at all of it for each byte takes more than twice as long"


async def test_an_http_server_that_fails_is_never_the_agents_doing(local_sandbox):
    def page(sent):
        message = json.loads(sent.body or b"{}")
        if message.get("method") == "tools/call":
            return 500, {}, b"out of notes"
        return 200, {}, json.dumps(mcp_server.answer(message)).encode()

    with web_server(page) as address:
        server = McpSettings(name="far", url=f"http://{address}/mcp")
        async with opened(local_sandbox, server, agent_runs_code=True) as tools:
            with pytest.raises(McpServerError, match="answered HTTP 500: out of notes"):
                await call(tools["far__add"], a=2, b=2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "a"}, "either `command` or `url`"),
        ({"name": "a", "command": ["x"], "url": "http://a"}, "either `command` or `url`"),
        ({"name": "a", "command": "x y"}, "as a list"),
        ({"name": "a b", "command": ["x"]}, "name"),
        ({"name": "a", "command": ["x"], "headers": {"a": "b"}}, "belong to a `url`"),
        ({"name": "a", "url": "ftp://a"}, "url"),
    ],
)
def test_settings_that_contradict_are_refused(table, message):
    with pytest.raises(ValidationError, match=message):
        McpSettings.model_validate(table)
