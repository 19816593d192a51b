"""A policy that plays a script, to test an environment or to try one out without a model.

It samples nothing, so its trajectory has messages but no segments. In its usage, each character counts as a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio

from api_schemas.rollouts import Usage
from api_schemas.trajectories import FinishReason, ForkReason, Message, ToolCall, Trajectory
from rollout_service.base.errors import ServiceError
from rollout_service.episodes import PolicyTurn
from rollout_service.tokens import ToolSpec


class ScriptEndedError(ServiceError):
    code = "script_ended"


ScriptedTurn = str | PolicyTurn | ServiceError | Callable[[Sequence[Message]], "str | PolicyTurn"]
"""A text, a turn (see `turn` and `call`), an error to raise, or a function of the conversation so far."""


class ScriptedPolicy:
    """Plays its turns in order, each in `delay` seconds of engine time; implements `episodes.Policy`."""

    def __init__(self, script: Iterable[ScriptedTurn], *, delay: float = 0.0) -> None:
        self.messages: list[Message] = []
        self.max_tokens: list[int] = []
        self.tools: list[ToolSpec] = []
        """The tools that were offered since the conversation was opened."""
        self._script = iter(script)
        self._delay = delay
        self._usage = Usage()
        self._finish_reasons: list[FinishReason] = []
        self.replaced: list[ForkReason] = []
        self.engine_seconds = 0.0

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        self.messages += new_messages
        self.max_tokens.append(max_tokens)
        await anyio.sleep(self._delay)
        self.engine_seconds += self._delay
        played = self._play()
        self.messages.append(played.message)
        self._finish_reasons.append(FinishReason.LENGTH if played.truncated else FinishReason.STOP)
        self._count(new_messages, played)
        return played

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        self.tools = list(tools)

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        self.messages = list(messages)
        self.replaced.append(reason)

    @property
    def usage(self) -> Usage:
        """Characters count as tokens."""
        return self._usage

    def trajectory(self) -> Trajectory:
        return Trajectory(
            segments=[], messages=list(self.messages), finish_reasons=self._finish_reasons, fork_counts={}
        )

    def _play(self) -> PolicyTurn:
        step = next(self._script, None)
        if step is None:
            raise ScriptEndedError(
                f"the script has no turn {self._usage.turns + 1}",
                hint="Add a turn, or a text as the last one.",
            )
        if isinstance(step, ServiceError):
            raise step
        played = step if isinstance(step, str | PolicyTurn) else step(self.messages)
        return turn(played) if isinstance(played, str) else played

    def _count(self, new_messages: Sequence[Message], played: PolicyTurn) -> None:
        calls = played.message.tool_calls
        usage = self._usage
        self._usage = Usage(
            turns=usage.turns + 1,
            prompt_tokens=usage.prompt_tokens + sum(len(message.content) for message in new_messages),
            sampled_tokens=usage.sampled_tokens + len(played.message.content) + sum(len(call.raw) for call in calls),
            tool_calls=usage.tool_calls + len(calls),
            malformed_calls=usage.malformed_calls + played.malformed,
        )


def turn(content: str = "", *calls: ToolCall, truncated: bool = False, context_full: bool = False) -> PolicyTurn:
    """Return a turn with this text and these calls, whose ids are numbered so that they differ."""
    numbered = [call.model_copy(update={"id": f"{call.id}-{i}"}) for i, call in enumerate(calls)]
    return PolicyTurn(
        message=Message(role="assistant", content=content, tool_calls=numbered),
        truncated=truncated or context_full,
        malformed=sum(call.error is not None for call in calls),
        context_full=context_full,
    )


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id="call", name=name, arguments=arguments, raw=f"{name}({arguments})")


def malformed_call() -> ToolCall:
    return ToolCall(id="call", name=None, arguments=None, raw="<tool_call>{", error="invalid_json")
