"""The policy gets exact tool definitions, a clear answer to each mistake, and bounded output."""

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from api_schemas.trajectories import ToolCall
from rollout_service.agents.tool_calling.agent import ToolCalls
from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS, builtin_tools
from rollout_service.agents.tool_calling.tools import (
    MIN_LIMIT,
    Arguments,
    FunctionTool,
    ToolContext,
    ToolInputError,
    ToolResult,
    by_name,
    cut_middle,
)
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from sandboxes.errors import SandboxClosedError

TOOLS = by_name(BUILTIN_TOOLS)


class Search(Arguments):
    title: str = Field(description="What to look for.")
    limit: int = 3


async def search(arguments: Search, context: ToolContext) -> str:
    return f"{arguments.title}:{arguments.limit}"


SEARCH = FunctionTool("search", "Look it up.", Search, search)


async def result_of(sandbox, name, seconds=10.0, output_chars=1_000, **arguments):
    return await TOOLS[name](arguments, ToolContext(sandbox, seconds, output_chars))


async def use(sandbox, name, **how):
    return (await result_of(sandbox, name, **how)).text


def test_a_definition_says_what_is_needed_and_no_more():
    assert SEARCH.definition == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look it up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "title": {"description": "What to look for.", "type": "string"},
                    "limit": {"default": 3, "type": "integer"},
                },
                "required": ["title"],
            },
        },
    }
    long = {"str_replace_editor": 1_100}
    assert all(len(json.dumps(tool.definition)) < long.get(tool.name, 400) for tool in BUILTIN_TOOLS)


async def test_arguments_are_checked():
    context = ToolContext(None, 1.0, 1_000)
    assert await SEARCH({"title": "a"}, context) == ToolResult("a:3")
    for arguments, message in [
        ({}, "title is missing"),
        ({"title": "a", "page": 1}, "there is no argument page"),
        ({"title": "a", "limit": "many"}, "limit: Input should be a valid integer"),
    ]:
        with pytest.raises(ToolInputError, match=message):
            await SEARCH(arguments, context)


async def test_a_tool_that_would_end_the_process_fails_its_rollout_alone():
    async def leave(arguments: Search, context: ToolContext) -> str:
        sys.exit(3)

    calls = ToolCalls([FunctionTool("go", "Go on.", Search, leave)])
    call = ToolCall(id="1", name="go", arguments={"title": "a"}, raw="")
    with pytest.raises(EnvironmentFailedError, match=r"the tool 'go' called sys.exit\(3\)"):
        await calls.run_one(call, ToolContext(None, 1.0, 1_000))


@pytest.mark.parametrize("result", ["x" * 5_000, ToolResult("x" * 5_000, answer="a")])
async def test_a_result_is_cut_to_the_limit_whoever_wrote_the_tool(result):
    async def talk(arguments: Search, context: ToolContext) -> str | ToolResult:
        return result

    found = await FunctionTool("go", "Go on.", Search, talk)({"title": "a"}, ToolContext(None, 1.0, 1_000))
    assert len(found.text) <= 1_000
    assert found.answer == getattr(result, "answer", None)


async def test_a_tool_that_returns_no_text_is_a_failure_of_its_environment():
    async def forgetful(arguments: Search, context: ToolContext) -> None:
        pass

    tool = FunctionTool("go", "Go on.", Search, forgetful)
    with pytest.raises(EnvironmentFailedError, match="the tool 'go' returned None"):
        await tool({"title": "a"}, ToolContext(None, 1.0, 1_000))


def test_unknown_and_doubled_names_are_refused():
    with pytest.raises(ConfigurationError, match="did you mean bash"):
        builtin_tools(["bsh"])
    with pytest.raises(ValueError, match="two tools"):
        by_name([SEARCH, SEARCH])


async def test_bash_keeps_its_state_and_shows_errors(local_sandbox):
    assert await use(local_sandbox, "bash", command="cd /tmp && x=5") == "[no output]"
    assert await use(local_sandbox, "bash", command="echo $PWD $x") == "/tmp 5"
    assert await use(local_sandbox, "bash", command="echo out; (exit 3)") == "out\n[exit code 3]"
    assert "[stopped: it took longer than 0.5 s]" in await use(
        local_sandbox, "bash", seconds=0.5, command="echo begun; sleep 30"
    )


async def test_a_shell_that_the_policy_ends_is_its_own_to_know(local_sandbox):
    said = await use(local_sandbox, "bash", command="echo last words; exit 7")
    assert "shell was restarted, its state is lost" in said
    assert await use(local_sandbox, "bash", command="echo again") == "again"


async def test_python_prints_and_explains(local_sandbox):
    assert await use(local_sandbox, "python", code="print(12*34)") == "408"
    assert await use(local_sandbox, "python", code="x = 4") == "[no output]"
    assert await use(local_sandbox, "python", code="print('a')\nx * 2") == "a\n8"
    wrong = await use(local_sandbox, "python", code="print('first'); 1/0")
    assert wrong.startswith("first\nZeroDivisionError")
    assert wrong.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("bash", {"command": "echo a"}, [{"command": "false"}, {"command": "exit 0"}]),
        ("python", {"code": "1"}, [{"code": "1/0"}, {"code": "while True: pass", "seconds": 0.5}]),
    ],
)
async def test_a_command_or_code_that_fails_is_a_failed_call(local_sandbox, name, right, wrong):
    assert not (await result_of(local_sandbox, name, **right)).failed
    for arguments in wrong:
        assert (await result_of(local_sandbox, name, **arguments)).failed


async def test_long_output_is_cut_and_notes_are_not(local_sandbox):
    said = await use(local_sandbox, "bash", output_chars=256, command="yes | head -c 100000; false")
    assert len(said) <= 256
    assert "characters cut" in said
    assert said.endswith("[exit code 1]")


async def test_files_are_read_written_and_edited(local_sandbox):
    assert await use(local_sandbox, "write", path="a/b.txt", content="one two\n") == "wrote a/b.txt"
    assert await use(local_sandbox, "edit", path="a/b.txt", old="two", new="three") == "edited a/b.txt"
    assert await use(local_sandbox, "read", path="a/b.txt") == "one three"
    for name, arguments in [
        ("read", {"path": "missing"}),
        ("read", {"path": "a"}),
        ("edit", {"path": "a/b.txt", "old": "e", "new": ""}),
        ("read", {"path": "a\0b"}),
        ("bash", {"command": "a\0b"}),
    ]:
        with pytest.raises(ToolInputError):
            await use(local_sandbox, name, **arguments)


async def test_a_failed_sandbox_is_not_blamed_on_the_policy(local_sandbox):
    await local_sandbox.close()
    with pytest.raises(SandboxClosedError):
        await use(local_sandbox, "bash", command="echo")


async def test_think_changes_nothing_and_finish_takes_numbers_too():
    assert await use(None, "think", thought="hm") == "noted"
    result = await TOOLS["finish"]({"answer": 42}, ToolContext(None, 1.0, 1_000))
    assert result.answer == "42"


@settings(deadline=None)
@given(st.text(max_size=3_000), st.integers(MIN_LIMIT, 2_000))
def test_the_ends_stay_and_the_note_counts_what_is_missing(text, limit):
    cut = cut_middle(text, limit)
    assert len(cut) <= limit
    if len(text) <= limit:
        assert cut == text
        return
    found = re.search(r"\n\[\.\.\. (\d+) characters cut \.\.\.\]\n", cut)
    head, tail = cut[: found.start()], cut[found.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(found[1]) == len(text) - len(head) - len(tail)
    assert 0 <= len(head) - len(tail) <= 1


@settings(deadline=None)
@given(st.text(alphabet="x", min_size=10, max_size=10_000_000 // 1_000))
def test_most_of_the_room_is_used(text):
    cut = cut_middle(text, 100)
    assert len(cut) == len(text) if len(text) <= 100 else len(cut) >= 96


def test_a_limit_without_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        cut_middle("text", MIN_LIMIT - 1)
