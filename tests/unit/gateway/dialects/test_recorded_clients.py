"""What real agents sent is read, and the calls that they were answered with come back by value."""

import json
from typing import Any

import pytest

from rollout_service.gateway.contract import ModelCall
from tests.support.gateway.recordings import NAMES, AnsweredCall, Recorded, load

WITHOUT_CALLS = ("aider", "smolagents")
"""Agents that take no tool calls, or write them into texts."""
REPAIRED = ("claude-malformed", "cline-length", "opencode-malformed", "pi-malformed", "qwen-malformed")
"""Runs in which agents replace the arguments, and some the name, of calls that are malformed."""

NOT_ECHOED = ("gemini-masking", "mini-malformed")
"""The last requests of a long run, and an agent that drops what is malformed."""


def by_value(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def answered(runs: list[Recorded]) -> dict[str, AnsweredCall]:
    return {call.id: call for run in runs for call in run.calls}


def inputs(call: AnsweredCall, echoed: str) -> Any:
    """Return the value that an echo must have; a custom tool's input is no JSON, but a function's one parameter."""
    value = by_value(call.arguments)
    custom = isinstance(value, str) and isinstance(inner := by_value(echoed), dict) and set(inner) == {"input"}
    return {"input": value} if custom else value


@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_read(name):
    for run in load(name):
        call = run.read()
        assert call.dialect is run.dialect
        assert call.model
        assert [message for message in call.messages if message.role == "user"]
        assert not [tool for tool in call.tools if not tool["function"]["name"]]
        assert call.fingerprint == run.read().fingerprint


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REPAIRED, *WITHOUT_CALLS, *NOT_ECHOED)])
def test_calls_come_back_by_value_under_their_ids(name):
    runs = load(name)
    sent: dict[str | None, AnsweredCall] = dict(answered(runs))
    seen: set[str | None] = set()
    for run in runs:
        for message in run.read().messages:
            for call in message.calls:
                assert call.id in sent, (name, run.number, call)
                assert call.name == sent[call.id].name
                assert by_value(call.arguments) == inputs(sent[call.id], call.arguments)
                seen.add(call.id)
    assert seen or len(sent) <= 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_CALLS])
def test_every_result_answers_a_call_of_the_history(name):
    for run in load(name):
        known: set[str | None] = set()
        for message in run.read().messages:
            known |= {call.id for call in message.calls}
            if message.role == "tool":
                assert message.call_id is not None
                assert message.call_id in known, (name, run.number, message)


def test_agents_are_known_by_their_headers():
    expected = {
        "codex": "codex",
        "claude": "claude_code",
        "qwen": "qwen_code",
        "gemini": "gemini_cli",
        "opencode": "opencode",
        "openhands": "openhands",
        "openai-agents": "openai_agents",
        "pi": "openai_js",
        "mini": "openai_python",
    }
    assert {name: load(name)[-1].read().lane.client for name in expected} == expected


def lanes(name: str) -> list[ModelCall]:
    return [run.read() for run in load(name)]


@pytest.mark.parametrize(("name", "purpose"), [("codex-subagent", "subagent"), ("claude-2.1.330-subagent", "subagent")])
def test_conversations_of_parallel_agents_are_told_apart(name, purpose):
    calls = lanes(name)
    assert len({call.lane.session for call in calls}) == 1
    agents = {call.lane.agent for call in calls}
    assert "" in agents
    assert len(agents) == 2
    assert {call.lane.purpose for call in calls if call.lane.agent} == {purpose}


def test_a_compaction_that_says_so_is_told():
    assert "compaction" in [call.lane.purpose for call in lanes("codex-compaction")]


def test_tools_that_are_found_later_leave_the_head_unchanged():
    calls = lanes("claude-2.1.330-tool-search")
    heads = {json.dumps(call.tools) for call in calls}
    assert len(heads) == 1
    assert [call for call in calls if call.deferred_tools]
    shown = [message.text for call in calls for message in call.messages if message.role == "tool"]
    assert [text for text in shown if "<tool>" in text]


def test_claude_codes_version_is_not_in_any_prompt():
    for name in NAMES:
        for call in lanes(name) if name.startswith("claude") else ():
            assert not [message for message in call.messages if "billing" in message.text]
