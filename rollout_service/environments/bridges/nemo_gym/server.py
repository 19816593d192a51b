"""A resources server of NeMo Gym at work in a sandbox, for one episode.

Guarantees: a reward is a finite number that the server gave; a verification that fails, takes too long or needed a
judge that cannot be reached is a failure. A tool's answer is the server's text, errors included, as in NeMo Gym's own
agent.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from pydantic import JsonValue

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.tools import ToolContext, ToolResult, with_notes
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.nemo_gym.library import NAME, PACKAGES, PYTHON, WORKER
from rollout_service.environments.bridges.process import LibraryProcess, library_in_sandbox, source_of
from rollout_service.environments.bridges.turns import Consequence
from rollout_service.episodes import Score
from rollout_service.tokens import ToolSpec
from sandboxes import Sandbox

BEGIN_SECONDS: Final = 120.0
STEP_SECONDS: Final = 60.0
VERIFY_SECONDS: Final = 240.0
MAX_PARTS: Final = 32
FAILURE_CLASS: Final = "_ng_failure_class"
"""A verdict with this field has no reward."""
_COMMAND: Final = (f"{PYTHON}/bin/python3", "-sP", "-W", "ignore", "-c")
_ENV: Final = {
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    # Sets must have the same order in each episode.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # numpy's threads would count against the sandbox's processes, as many as the host has processors.
    "OPENBLAS_NUM_THREADS": "1",
    "HOME": "/tmp",  # noqa: S108 - the sandbox's own
}


@dataclass(frozen=True, slots=True)
class Beginning:
    has_turns: bool
    """The server answers and rewards each turn, as environments of Gymnasium do."""
    tools: frozenset[str]
    """The tools of the row that it answers."""
    observation: str | None


class GymServer:
    """`open_server` starts one.

    Its methods raise EnvironmentFailedError if it has ended, hangs, refuses the row, or gives no verdict.
    """

    def __init__(self, process: LibraryProcess, row: dict[str, JsonValue]) -> None:
        self._process = process
        self._row = row

    async def begin(self, server: str, config: dict[str, JsonValue]) -> Beginning:
        request = {"op": "begin", "server": server, "row": self._row, "config": config}
        reply = await self._process.ask(request, BEGIN_SECONDS)
        return Beginning(bool(reply["turns"]), frozenset(reply["tools"]), reply["observation"])

    async def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> str:
        reply = await self._process.ask({"op": "call", "tool": tool, "arguments": arguments}, seconds)
        return str(reply["text"])

    async def verify(self, messages: Sequence[Message], usage: Usage, stop_reason: StopReason) -> Score:
        """Return the verdict on the messages after the prompt."""
        row = self._with_response(messages, usage, stop_reason)
        reply = await self._process.ask({"op": "verify", "row": row}, VERIFY_SECONDS)
        return read_verdict(reply["verdict"], self._row)

    async def step(self, action: str) -> Consequence:
        row = self._with_response([Message(role="assistant", content=action)], Usage())
        result = (await self._process.ask({"op": "step", "row": row}, STEP_SECONDS))["step"]
        done = bool(result.get("terminated") or result.get("truncated"))
        observation = result.get("observation")
        if not done and not observation:
            raise EnvironmentFailedError(f"{NAME} ended no episode, and gave nothing to answer")
        return Consequence(text=str(observation or ""), reward=read_reward(result), done=done)

    def _with_response(
        self, messages: Sequence[Message], usage: Usage, stop_reason: StopReason | None = None
    ) -> dict[str, Any]:
        parameters = self._row["responses_create_params"]
        tools = parameters.get("tools") if isinstance(parameters, dict) else None
        known = tools if isinstance(tools, list) else []
        return {**self._row, "response": as_response(messages, known, usage, stop_reason)}


class GymTool:
    """Implements `tool_calling.tools.Tool`.

    One that the server does not answer ends the agent: the call itself is verified.
    """

    parallel = False

    def __init__(self, server: GymServer, definition: ToolSpec, *, is_answered: bool) -> None:
        self._server = server
        self._is_answered = is_answered
        self.definition = definition
        self.name = str(definition["function"]["name"])

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        if not self._is_answered:
            return ToolResult("", answer="")
        text = await self._server.call(self.name, arguments, context.seconds)
        return ToolResult(with_notes(text, [], context.output_chars))


@asynccontextmanager
async def open_server(sandbox: Sandbox, row: dict[str, JsonValue]) -> AsyncIterator[GymServer]:
    async with library_in_sandbox(sandbox, [*_COMMAND, source_of(WORKER), PACKAGES], NAME, env=_ENV) as process:
        yield GymServer(process, row)


def read_reward(reply: dict[str, Any]) -> float:
    """
    Raises:
        EnvironmentFailedError: There is none, or it is not a finite number.
    """
    reward = reply.get("reward")
    if failure := reply.get(FAILURE_CLASS):
        raise EnvironmentFailedError(f"{NAME} gave no reward: {failure}")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EnvironmentFailedError(f"{NAME} gave no reward but {reward!r}")
    return float(reward)


def read_verdict(verdict: dict[str, Any], row: dict[str, JsonValue]) -> Score:
    """Keep the verdict's other numbers that are not the row's."""
    parts = {
        name: float(value)
        for name, value in verdict.items()
        if name not in row and name != "reward" and isinstance(value, int | float) and math.isfinite(value)
    }
    return Score(read_reward(verdict), dict(list(parts.items())[:MAX_PARTS]))


# NeMo Gym's servers verify a `Response` of OpenAI's Responses API. It has what the policy said and what its tools
# answered, in this order. A call that could not be parsed is left out together with its explanation, since it has no
# arguments.

CUT_OFF: Final = {
    *(StopReason.TRUNCATED, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL),
}
"""A limit of tokens cut the answer off."""


def as_response(
    messages: Sequence[Message], tools: Sequence[Any], usage: Usage, stop_reason: StopReason | None = None
) -> dict[str, Any]:
    """Make a response of the messages after the prompt; `tools` are the row's."""
    return {
        "id": "resp_policy",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": list(_items(messages)),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": list(tools),
        "incomplete_details": {"reason": "max_output_tokens"} if stop_reason in CUT_OFF else None,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        },
    }


def _items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    calls: dict[str, str] = {}
    """Ids of the last turn's calls, by the policy's own, which are unique in their turn alone."""
    for number, message in enumerate(messages):
        if message.role == "assistant":
            calls = {
                call.id: f"call_{number}_{place}"
                for place, call in enumerate(message.tool_calls)
                if call.error is None and call.arguments is not None
            }
            yield from _turn(message, number, calls)
        elif message.role == "tool" and message.tool_call_id in calls:
            output = {"call_id": calls[message.tool_call_id], "output": message.content}
            yield {"type": "function_call_output", **output}
        elif message.role == "user":
            yield {"type": "message", "role": "user", "content": message.content}


def _turn(message: Message, number: int, calls: dict[str, str]) -> Iterator[dict[str, Any]]:
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary}
    if message.content or not calls:
        content = [{"type": "output_text", "text": message.content, "annotations": []}]
        about = {"id": f"msg_{number}", "role": "assistant", "status": "completed"}
        yield {"type": "message", **about, "content": content}
    for call in message.tool_calls:
        if call.id in calls:
            named = {"name": call.name, "arguments": json.dumps(call.arguments), "call_id": calls[call.id]}
            yield {"type": "function_call", "id": f"fc_{number}_{call.id}", "status": "completed", **named}
