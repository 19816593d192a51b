"""The built-in agent: the policy answers, its tool calls run, and their results go back to it.

A failure of the infrastructure ends the rollout with a typed error. Whatever stops the agent, the calls and seconds so
far are counted, and the conversation ends after a whole turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import anyio

from api_schemas.rollouts import StopReason
from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import Message, ToolCall
from rollout_service.activity import in_lane, waits_for
from rollout_service.agents.tool_calling.builtin_tools import FINISH
from rollout_service.agents.tool_calling.tools import (
    Tool,
    ToolContext,
    ToolInputError,
    ToolResult,
    by_name,
    cut_middle,
    sample_turn,
    why_truncated,
)
from rollout_service.episodes import ESCAPING, Episode, PolicyTurn, contain
from rollout_service.tokens import ToolSpec
from sandboxes.errors import LimitExceededError
from sandboxes.task_groups import open_task_group


class CallRunner(Protocol):
    """Runs the tool calls of an agent's turns; `ToolCalls` is the plain one."""

    @property
    def definitions(self) -> list[ToolSpec]: ...

    def stop_reason(self, episode: Episode) -> StopReason | None:
        """Return None if there may be a further turn."""
        ...

    async def run(self, episode: Episode, calls: Sequence[ToolCall]) -> list[Message]:
        """Return results in the order of the calls; none if one of them ended the agent."""
        ...


class ToolCallingAgent:
    def __init__(self, tools: Sequence[Tool] = (), *, calls: CallRunner | None = None) -> None:
        """Pass `tools` or `calls`."""
        self._calls = calls or ToolCalls(tools)

    @property
    def definitions(self) -> list[ToolSpec]:
        return self._calls.definitions

    async def run(self, episode: Episode, messages: Sequence[Message]) -> StopReason:
        """Work on a task; put the final text in `episode.answer`."""
        with episode.clock.limit(episode.limits.agent_seconds):
            return await self._run_turns(episode, list(messages))
        return StopReason.AGENT_TIMEOUT

    async def _run_turns(self, episode: Episode, messages: list[Message]) -> StopReason:
        limits = episode.limits
        malformed_turns = 0
        for _ in range(limits.max_turns):
            if reason := self._calls.stop_reason(episode):
                return reason
            turn = await sample_turn(episode, messages)
            if isinstance(turn, StopReason):
                return turn
            well_formed = any(call.error is None for call in turn.message.tool_calls)
            if not well_formed and (reason := _stop_reason_of(turn, episode)):
                return reason
            malformed_turns = 0 if well_formed else malformed_turns + 1
            if malformed_turns >= limits.max_malformed:
                return StopReason.MALFORMED
            known = _after_turn(episode, episode.known_results)
            messages = known or await self._run_calls(episode, turn.message.tool_calls)
            if not messages:
                return StopReason.FINISHED
        return StopReason.MAX_TURNS

    async def _run_calls(self, episode: Episode, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the results of an earlier rollout as long as that is played again."""
        results = await self._calls.run(episode, calls)
        earlier = _after_turn(episode, episode.earlier_results)
        if len(earlier) != len(results):
            return results
        return [
            now.model_copy(update={"content": before.content}) for now, before in zip(results, earlier, strict=True)
        ]


def _after_turn(episode: Episode, results: Sequence[list[Message]]) -> list[Message]:
    """Return the last turn's results; none if they are not known.

    An environment may run agents one after another, and not every turn has calls.
    """
    turn = episode.policy.usage.turns - 1
    return results[turn] if turn < len(results) else []


def final_answer(messages: Sequence[Message]) -> str | None:
    """Return the text passed to `finish`, or the last message."""
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if last is None:
        return None
    for call in last.tool_calls:
        if call.name == FINISH.name and call.error is None and call.arguments is not None:
            return str(call.arguments.get("answer", ""))
    return last.content or None


def _stop_reason_of(turn: PolicyTurn, episode: Episode) -> StopReason | None:
    """Return why this turn is the last; None if it has malformed calls to answer."""
    if not turn.truncated:
        return None if turn.message.tool_calls else StopReason.ANSWERED
    return why_truncated(turn, episode)


TOOL_STATE = "tools"
"""Key of the tools' state in `Episode.state`."""
COMMANDS = ("command", "code")
"""Arguments that tools run as commands or code."""
COMMAND_CHARS = 200
NAME_CHARS = 64
"""How much of a tool's name that there is not the policy reads again."""
GRACE_SECONDS = 5.0
"""Beyond its limit, for a tool to end by itself, which leaves a better result than cutting it off."""


class ToolCalls:
    """The calls of a set of tools; implements `CallRunner`.

    Results are in the order of the calls. A malformed call gets an explanation as its result. So does a call for which
    the agent left no room in its sandbox. Calls of a turn run one after another, except for neighbors whose tools
    change nothing, which run at the same time.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = by_name(tools)

    @property
    def definitions(self) -> list[ToolSpec]:
        return [tool.definition for tool in self._tools.values()]

    def stop_reason(self, episode: Episode) -> StopReason | None:  # noqa: ARG002 - the agent's own limits suffice
        return None

    async def run(self, episode: Episode, calls: Sequence[ToolCall]) -> list[Message]:
        context = context_of(episode)
        messages: list[Message] = []
        started = time.perf_counter()
        try:
            for parallel, batch in groupby(calls, self.is_parallel):
                together = list(batch)
                episode.tool_calls += len(together)
                results = (
                    await self._run_in_parallel(together, context)
                    if parallel and len(together) > 1
                    else await self._run_in_order(together, context)
                )
                for call, result in zip(together, results, strict=False):
                    if result.answer is not None:
                        episode.answer = result.answer
                        return []
                    if result.failed:
                        episode.tool_error_turns.add(episode.policy.usage.turns - 1)
                    messages.append(message_of(call, result.text))
        finally:
            episode.tool_seconds += time.perf_counter() - started
        return messages

    def knows(self, call: ToolCall) -> bool:
        return call.error is None and call.name in self._tools

    def is_parallel(self, call: ToolCall) -> bool:
        return self.knows(call) and self._tools[call.name or ""].parallel

    async def _run_in_order(self, calls: Sequence[ToolCall], context: ToolContext) -> list[ToolResult]:
        """Stop after the first call that ends the agent."""
        results: list[ToolResult] = []
        for call in calls:
            results.append(await self.run_one(call, context))
            if results[-1].answer is not None:
                break
        return results

    async def _run_in_parallel(self, calls: Sequence[ToolCall], context: ToolContext) -> list[ToolResult]:
        results: list[ToolResult] = [ToolResult("")] * len(calls)

        async def one(index: int) -> None:
            with in_lane(calls[index].id):
                results[index] = await self.run_one(calls[index], context)

        async with open_task_group() as tasks:
            for index in range(len(calls)):
                tasks.start_soon(one, index)
        return results

    async def run_one(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.error is not None or call.arguments is None:
            text = f"This call is malformed ({call.error}); nothing was run. Write it again."
            return ToolResult(text, failed=True)
        tool = self._tools.get(call.name or "")
        if tool is None:
            text = f"There is no tool {str(call.name)[:NAME_CHARS]!r}. Tools: {', '.join(self._tools) or 'none'}."
            return ToolResult(text, failed=True)
        try:
            with anyio.CancelScope(deadline=asyncio.get_running_loop().time() + context.seconds + GRACE_SECONDS):
                with waits_for(StepKind.TOOL, tool.name, **_detail(call, context)) as step:
                    step.limit = context.seconds
                    try:
                        return await tool(call.arguments, context)
                    except ESCAPING as error:
                        contain(error, f"the tool {tool.name!r}")
        except ToolInputError as error:
            return ToolResult(cut_middle(str(error), context.output_chars), failed=True)
        except LimitExceededError as error:
            if error.limit == "lifetime":
                raise
            return ToolResult(f"[{error}]", failed=True)
        return ToolResult(f"[stopped: it took longer than {context.seconds:g} s]", failed=True)


def _detail(call: ToolCall, context: ToolContext) -> dict[str, str]:
    """Note no more than the first line of a command or code."""
    detail = {"call": call.id}
    for name in COMMANDS:
        if isinstance(text := (call.arguments or {}).get(name), str):
            line = text[: 10 * COMMAND_CHARS].lstrip().partition("\n")[0]
            detail["command"] = line[:COMMAND_CHARS]
    if context.sandbox is not None:
        detail["sandbox"] = context.sandbox.id
    return detail


def context_of(episode: Episode) -> ToolContext:
    limits = episode.limits
    return ToolContext(
        episode.sandbox,
        limits.tool_seconds,
        limits.tool_output_chars,
        episode.limit_violations,
        episode.state.setdefault(TOOL_STATE, {}),
        episode.instance,
        episode,
    )


def message_of(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_calls=[], tool_call_id=call.id, name=call.name)
