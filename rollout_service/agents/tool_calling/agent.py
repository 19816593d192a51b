"""The built-in agent: the policy answers, its tool calls run, and their results go back to it.

Guarantees:
- A failure of the infrastructure ends the rollout with a typed error.
- Whatever stops the agent, the calls and seconds so far are counted, and the conversation ends after a whole turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message, ToolCall
from rollout_service.agents.tool_calling.builtin_tools import FINISH
from rollout_service.agents.tool_calling.calls import ToolCalls
from rollout_service.agents.tool_calling.tools import Tool
from rollout_service.agents.turns import sample_turn, why_truncated
from rollout_service.episodes import Episode, PolicyTurn
from rollout_service.tokens import ToolSpec


class CallRunner(Protocol):
    """Runs the tool calls of an agent's turns; `calls.ToolCalls` is the plain one."""

    @property
    def definitions(self) -> list[ToolSpec]:
        """The definitions of the tools for the policy."""
        ...

    def stop_reason(self, episode: Episode) -> StopReason | None:
        """Return why there may be no further turn; None if there may."""
        ...

    async def run(self, episode: Episode, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the results of a turn's calls in their order; empty if one of them ended the agent."""
        ...


class ToolCallingAgent:
    """Runs a policy with a set of tools."""

    def __init__(self, tools: Sequence[Tool] = (), *, calls: CallRunner | None = None) -> None:
        """Pass the tools, or the runner of their calls."""
        self._calls = calls or ToolCalls(tools)

    @property
    def definitions(self) -> list[ToolSpec]:
        """The tools' definitions for the policy."""
        return self._calls.definitions

    async def run(self, episode: Episode, messages: Sequence[Message]) -> StopReason:
        """Work on a task that begins with these messages; put the final text in `episode.answer`.

        Errors of the engine, the renderer and the sandbox are raised as they are.
        """
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
            messages = await self._calls.run(episode, turn.message.tool_calls)
            if not messages:
                return StopReason.FINISHED
        return StopReason.MAX_TURNS


def final_answer(messages: Sequence[Message]) -> str | None:
    """Return the agent's answer in a finished conversation: the text passed to `finish`, or its last message."""
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if last is None:
        return None
    for call in last.tool_calls:
        if call.name == FINISH.name and call.error is None and call.arguments is not None:
            return str(call.arguments.get("answer", ""))
    return last.content or None


def _stop_reason_of(turn: PolicyTurn, episode: Episode) -> StopReason | None:
    """Return why a turn without a well-formed call is the last; None if it has malformed calls to answer."""
    if not turn.truncated:
        return None if turn.message.tool_calls else StopReason.ANSWERED
    return why_truncated(turn, episode)
