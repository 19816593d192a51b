"""A conversation as the library takes it: its messages, and the token ids of each turn as they were sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from api_schemas.trajectories import FinishReason, Message, ToolCall, Trajectory


def library_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the library's form. A malformed call keeps the text that was sampled as its arguments."""
    return [_message(message) for message in messages]


def library_turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return whether each turn was cut off, and its ids."""
    return [
        {"truncated": reason is FinishReason.LENGTH, "tokens": _tokens(trajectory, number)}
        for number, reason in enumerate(trajectory.finish_reasons)
    ]


def _message(message: Message) -> dict[str, Any]:
    match message.role:
        case "assistant":
            return {
                "role": "assistant",
                "content": message.content,
                "reasoning_content": message.reasoning,
                "tool_calls": [_call(call) for call in message.tool_calls] or None,
            }
        case "tool":
            called = {"tool_call_id": message.tool_call_id or "", "name": message.name}
            return {"role": "tool", "content": message.content, **called}
        case "developer":
            return {"role": "system", "content": message.content}
        case role:
            return {"role": role, "content": message.content}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else json.dumps(call.arguments)
    return {"id": call.id, "name": call.name or "", "arguments": arguments}


def _tokens(trajectory: Trajectory, turn: int) -> dict[str, Any] | None:
    """Return a turn's ids, or None if they were not recorded, as by a scripted policy."""
    for segment in [*trajectory.segments, *trajectory.untrained]:
        if turn not in segment.turn_ids:
            continue
        start = segment.turn_ids.index(turn)
        end = len(segment.turn_ids) - segment.turn_ids[::-1].index(turn)
        return {
            "prompt_ids": segment.token_ids[:start],
            "completion_ids": segment.token_ids[start:end],
            "completion_logprobs": segment.logprobs[start:end],
        }
    return None
