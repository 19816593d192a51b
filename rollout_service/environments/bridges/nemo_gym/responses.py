"""A conversation as a `Response` of OpenAI's Responses API, which is what NeMo Gym's servers verify.

Guarantee: it has what the policy said and what its tools answered, in this order. A call that could not be parsed is
left out together with its explanation, since it has no arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import Message

CUT_OFF: Final = {
    *(StopReason.TRUNCATED, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL),
}
"""The stop reasons of an answer that a limit of tokens cut off."""


def as_response(
    messages: Sequence[Message], tools: Sequence[Any], usage: Usage, stop_reason: StopReason | None = None
) -> dict[str, Any]:
    """Return the messages after the prompt as a response to it; `tools` are the row's."""
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
    """The ids of the last turn's calls, by the policy's own, which are unique in their turn alone."""
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
