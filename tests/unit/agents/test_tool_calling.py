"""The built-in agent gives the true reason to stop, keeps results in order, and tells mistakes from failures."""

from contextlib import contextmanager
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling import agent
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.builtin_tools import FINISH
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolInputError
from rollout_service.episodes import ContextFullError
from rollout_service.testing.scripted_policy import (
    ScriptedPolicy,
    ScriptEndedError,
    call,
    malformed_call,
    turn,
)
from sandboxes.errors import SandboxStartError
from tests.support.episodes import scripted_episode

TASK = [Message(role="user", content="Do it.")]


class Log(Arguments):
    text: str
    seconds: float = 0.0


class Recorder:
    """Two tools that record when they run."""

    def __init__(self):
        self.events = []
        self.tools = [
            FunctionTool("log", "", Log, self._log),
            FunctionTool("look", "", Log, self._log, parallel=True),
            FINISH,
        ]

    async def _log(self, arguments, context):
        self.events.append(f"+{arguments.text}")
        await anyio.sleep(arguments.seconds)
        self.events.append(f"-{arguments.text}")
        if arguments.text == "wrong":
            raise ToolInputError("that is wrong")
        if arguments.text == "broken":
            raise SandboxStartError("the sandbox is broken")
        return f"did {arguments.text}"


def episode(script, delay=0.0, **limits):
    return scripted_episode(policy=ScriptedPolicy(script, delay=delay), limits=limits)


async def play(script, recorder=None, **limits):
    played = episode(script, **limits)
    recorder = recorder or Recorder()
    reason = await ToolCallingAgent(recorder.tools).run(played, TASK)
    return reason, played


def results(played):
    return [message.content for message in played.policy.messages if message.role == "tool"]


async def test_it_answers_after_its_calls():
    reason, played = await play([turn("Hm.", call("log", text="a"), call("log", text="b")), "It is 7."])
    assert reason is StopReason.ANSWERED
    assert played.answer == "It is 7."
    assert results(played) == ["did a", "did b"]
    tool_messages = [message for message in played.policy.messages if message.role == "tool"]
    assert [message.tool_call_id for message in tool_messages] == ["call-0", "call-1"]
    assert (played.tool_calls, played.tool_error_turns) == (2, set())


async def test_a_sandbox_may_be_paused_during_each_turn_and_no_call():
    recorder = Recorder()
    played = episode([turn("", call("log", text="a")), "Done."])
    played.sandbox = SimpleNamespace(id="s")

    @contextmanager
    def pauses(sandbox):
        assert sandbox is played.sandbox
        recorder.events.append("waits")
        yield
        recorder.events.append("goes on")

    played.pauses = pauses
    await ToolCallingAgent(recorder.tools).run(played, TASK)
    assert recorder.events == ["waits", "goes on", "+a", "-a", "waits", "goes on"]


async def test_finish_ends_the_agent_and_later_calls_are_not_run():
    recorder = Recorder()
    calls = [call("log", text="a"), call("finish", answer="42"), call("log", text="b")]
    reason, played = await play([turn("", *calls)], recorder)
    assert (reason, played.answer) == (StopReason.FINISHED, "42")
    assert recorder.events == ["+a", "-a"]


async def test_the_policy_sees_its_mistakes():
    calls = [
        malformed_call(),
        call("log"),
        call("lgo", text="a"),
        call("log", text="wrong"),
        call("log", text="right"),
    ]
    right, *wrongs = reversed(calls)
    script = [turn("", *calls), *(turn("", one, right) for one in wrongs), turn("", right), "done"]
    reason, played = await play(script, max_malformed=9)
    assert reason is StopReason.ANSWERED
    assert played.tool_error_turns == {0, 1, 2, 3, 4}
    malformed, missing, unknown, wrong, right, *_ = results(played)
    assert "malformed (invalid_json)" in malformed
    assert "text is missing" in missing
    assert "no tool 'lgo'. Tools: log, look, finish" in unknown
    assert wrong == "that is wrong"
    assert right == "did right"


async def test_what_is_said_of_mistakes_is_within_the_limit():
    long = "x" * 5_000
    _, played = await play([turn("", call(long), call("log", **{long: 1})), "done"], tool_output_chars=256)
    assert max(map(len, results(played))) <= 256


@pytest.mark.parametrize("name", ["log", "look"])
async def test_a_failure_of_the_infrastructure_keeps_its_type(name):
    with pytest.raises(SandboxStartError):
        await play([turn("", call(name, text="broken"), call(name, text="b", seconds=5.0)), "done"])


async def test_calls_run_at_once_only_where_that_is_safe():
    recorder = Recorder()
    calls = [
        call("log", text="a"),
        call("look", text="b", seconds=0.05),
        call("look", text="c"),
        call("log", text="d"),
    ]
    _, played = await play([turn("", *calls), "done"], recorder)
    assert recorder.events == ["+a", "-a", "+b", "+c", "-c", "-b", "+d", "-d"]
    assert results(played) == ["did a", "did b", "did c", "did d"]


async def test_turns_are_limited_and_the_last_calls_are_still_run():
    recorder = Recorder()
    reason, played = await play(
        [turn("one", call("log", text="a")), turn("two", call("log", text="b"))], recorder, max_turns=2
    )
    assert reason is StopReason.MAX_TURNS
    assert recorder.events[-1] == "-b"
    assert played.answer == "two"


async def test_tokens_are_limited_over_all_turns():
    script = [turn("x" * 30, call("log", text="a")), turn("x" * 40, call("log", text="b"))]
    reason, played = await play(script, max_tokens=100, max_turn_tokens=60)
    assert reason is StopReason.MAX_TOKENS
    assert played.policy.max_tokens == [60, 100 - 30 - len("log({'text': 'a'})")]


@pytest.mark.parametrize(
    ("cut_off", "limits", "reason"),
    [
        (turn("x" * 20, truncated=True), {}, StopReason.TRUNCATED),
        (turn("x" * 20, malformed_call(), truncated=True), {}, StopReason.TRUNCATED),
        (turn("x" * 20, truncated=True), {"max_tokens": 20}, StopReason.MAX_TOKENS),
        (turn("x" * 20, context_full=True), {}, StopReason.CONTEXT_FULL),
        (ContextFullError("full"), {}, StopReason.CONTEXT_FULL),
        (turn("x", call("finish", answer="1"), truncated=True), {}, StopReason.FINISHED),
    ],
)
async def test_a_turn_that_was_cut_off(cut_off, limits, reason):
    assert (await play([cut_off], **limits))[0] is reason


async def test_malformed_turns_in_a_row_end_it():
    bad, good = (
        turn("", malformed_call(), malformed_call()),
        turn("", malformed_call(), call("log", text="a")),
    )
    assert (await play([bad, bad, bad], max_malformed=3))[0] is StopReason.MALFORMED
    assert (await play([bad, bad, good, bad, bad, "done"], max_malformed=3))[0] is StopReason.ANSWERED


async def test_its_wall_clock_ends_a_tool_and_a_turn():
    reason, played = await play([turn("on it", call("log", text="a", seconds=60.0))], agent_seconds=0.1)
    assert (reason, played.answer, played.tool_calls) == (StopReason.AGENT_TIMEOUT, "on it", 1)
    assert played.tool_seconds >= 0.09
    slow = episode(["never"], delay=60.0, agent_seconds=0.1)
    assert await ToolCallingAgent([]).run(slow, TASK) is StopReason.AGENT_TIMEOUT
    assert slow.policy.usage.turns == 0


async def test_a_tool_without_a_time_limit_of_its_own_is_given_one(monkeypatch):
    monkeypatch.setattr(agent, "GRACE_SECONDS", 0.05)
    _, played = await play([turn("", call("log", text="a", seconds=60.0)), "done"], tool_seconds=0.05)
    assert results(played) == ["[stopped: it took longer than 0.05 s]"]


async def test_a_cancellation_from_outside_is_not_taken_for_the_agents_own():
    played = episode([turn("", call("log", text="a", seconds=60.0))])
    with anyio.move_on_after(0.05) as scope:
        await ToolCallingAgent(Recorder().tools).run(played, TASK)
    assert scope.cancelled_caught
    assert played.tool_calls == 1


async def test_a_script_that_is_too_short_says_so():
    with pytest.raises(ScriptEndedError, match="no turn 2"):
        await play([turn("", call("log", text="a"))])


@settings(deadline=None)  # an event loop is started for each example
@given(st.lists(st.sampled_from(["log", "look", "malformed", "unknown"]), max_size=12))
def test_every_call_is_answered_in_its_place(names):
    calls = [
        malformed_call() if name == "malformed" else call(name, text=str(index)) for index, name in enumerate(names)
    ]

    async def main():
        return await play([turn("", *calls), "done"])

    _, played = anyio.run(main)
    answered = [message.tool_call_id for message in played.policy.messages if message.role == "tool"]
    assert answered == [f"call-{index}" for index in range(len(names))]
    for index, name in enumerate(names):
        if name in ("log", "look"):
            assert results(played)[index] == f"did {index}"
