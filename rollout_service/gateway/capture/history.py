"""A client's messages: their meaning as a hash, and as the messages that a chat format renders.

Two messages have the same key if they mean the same. Arguments are compared by value: the order of keys, white space,
escapes, and `1.0` for `1` make no difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from api_schemas.trajectories import Message, ToolCall
from rollout_service.base import strict_json
from rollout_service.gateway.contract import ClientMessage, ClientToolCall
from rollout_service.tokens import ToolSpec

_SIZE = 16


@dataclass(frozen=True, slots=True)
class Head:
    """The system prompt and the tools before a conversation, as hashes, since every turn has a head."""

    system: bytes
    tools: bytes
    """Empty if there are none."""

    @classmethod
    def of(cls, messages: Sequence[ClientMessage], tools: Sequence[ToolSpec]) -> Head:
        """Make a head; the leading system messages must be joined."""
        system = messages[0].text.strip() if messages and messages[0].role == "system" else ""
        written = orjson.dumps([dict(tool) for tool in tools], option=orjson.OPT_SORT_KEYS) if tools else b""
        return cls(digest(b"", system), blake2b(written, digest_size=_SIZE).digest() if tools else b"")

    def key(self) -> bytes:
        return blake2b(self.system + self.tools, digest_size=_SIZE).digest()


def digest(before: bytes, *texts: str | None) -> bytes:
    written = repr(texts)  # tells any texts apart, and is quick for many short ones
    return blake2b(before + written.encode(), digest_size=_SIZE).digest()


def extended(state: bytes, message: ClientMessage) -> bytes:
    if message.role != "assistant":
        return digest(state, message.role, message.call_id, message.text)
    calls = (part for call in message.calls for part in (call.name, canonical(call.arguments)))
    return digest(state, message.role, message.text.strip(), *calls)


def echo_key(message: ClientMessage) -> bytes:
    calls = (part for call in message.calls for part in (call.id, call.name, call.arguments))
    return digest(b"", message.text, message.reasoning, *calls)


MAX_VALUES = 10_000
"""More are not compared by value: reading a million holds up the whole process for a second, in whatever thread."""


def has_many_values(text: str) -> bool:
    return len(text) > MAX_VALUES and strict_json.has_more(text.encode("utf-8", "replace"), b",{[", MAX_VALUES)


def canonical(arguments: str) -> str:
    """Return one form for each value, or the arguments as they are if they are not JSON or have too many values."""
    if has_many_values(arguments):
        return arguments
    try:
        return json.dumps(_plain(json.loads(arguments)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def as_messages(
    messages: Sequence[ClientMessage], calls: Mapping[str, ToolCall], before: Sequence[ToolCall] = ()
) -> list[Message]:
    """Prepare messages for rendering.

    `calls` has the policy's calls by the ids under which the client knows them; those in `before` were made right
    before these messages. Results without an id answer such calls in their order.
    """
    rendered: list[Message] = []
    open_calls = {call.id: call for call in before}
    for message in messages:
        if message.role == "assistant":
            made = [_as_call(number, call, calls) for number, call in enumerate(message.calls)]
            open_calls = {call.id: call for call in made}
            rendered.append(
                Message.model_construct(
                    role="assistant",
                    content=message.text,
                    reasoning=message.reasoning,
                    tool_calls=made,
                    tool_call_id=None,
                    name=None,
                )
            )
        elif message.role == "tool":
            rendered.append(_as_result(message, calls, open_calls))
        else:
            rendered.append(Message(role=message.role, content=message.text))
    return rendered


def _as_result(message: ClientMessage, calls: Mapping[str, ToolCall], open_calls: dict[str, ToolCall]) -> Message:
    answered = calls.get(message.call_id or "")
    if answered is None and message.call_id is None:
        named = (call for call in open_calls.values() if message.tool_name in (None, call.name))
        answered = next(named, None)
    if answered is not None:
        open_calls.pop(answered.id, None)
    return Message(
        role="tool",
        content=message.text,
        tool_call_id=answered.id if answered is not None else message.call_id,
        name=message.tool_name or (answered.name if answered is not None else None),
    )


def _as_call(number: int, call: ClientToolCall, calls: Mapping[str, ToolCall]) -> ToolCall:
    known = calls.get(call.id or "")
    arguments = _storable(call.arguments)
    return ToolCall.model_construct(
        id=known.id if known is not None else call.id or f"call-{number}",
        name=call.name,
        arguments=arguments,
        raw=call.arguments,
        error="arguments_not_an_object" if arguments is None else None,
    )


def _storable(arguments: str) -> dict[str, Any] | None:
    """Return None for what cannot be stored, since a trajectory with it could not be either."""
    try:
        value = strict_json.parse(bytes(strict_json.without_half_pairs(arguments.encode("utf-8", "replace"))))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
