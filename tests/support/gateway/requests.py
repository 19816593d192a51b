"""Keeps the requests that programs send to a gateway, and renders them as transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from rollout_service.gateway.contract import ClientMessage, ModelCall, map_roles
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.server.app import GatewayApp
from rollout_service.gateway.server.paths import Action, GatewayRequest


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request for an answer, as its program sent it."""

    head: GatewayRequest
    body: bytes

    def call(self) -> ModelCall:
        """Read it."""
        return CODECS[self.head.dialect].read(self.body, self.head.headers, self.head.target)


class RequestLog:
    """The requests for answers to all gateways of a service."""

    def __init__(self) -> None:
        self.requests: list[SentRequest] = []

    def app(self, *parts: Any) -> RecordingApp:
        """Return a gateway's application which keeps them; in the place of `GatewayApp`."""
        return RecordingApp(self, *parts)

    def calls_naming(self, text: str) -> list[ModelCall]:
        """Return the calls whose messages have this text, in the order of their arrival."""
        calls = [request.call() for request in self.requests if text.encode() in request.body]
        return [call for call in calls if any(text in message.text for message in call.messages)]


class RecordingApp(GatewayApp):
    """A gateway's application which keeps the requests for answers."""

    def __init__(self, log: RequestLog, *parts: Any) -> None:
        super().__init__(*parts)
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def noting() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False) and head.action is Action.ANSWER:
                    self._log.requests.append(SentRequest(head, b"".join(parts)))
            return message

        head = GatewayRequest.of(scope) if scope["type"] == "http" else None
        await super().__call__(scope, noting, send)


def rendered(tokenizer: Any, call: ModelCall) -> list[int]:
    """Return the prompt of a call as the chat template of a tokenizer of transformers writes it."""
    wire = [as_openai(message) for message in map_roles(call.messages)]
    tools = [dict(tool) for tool in call.tools] or None
    return list(tokenizer.apply_chat_template(wire, tools=tools, add_generation_prompt=True, return_dict=False))


def as_openai(message: ClientMessage) -> dict[str, Any]:
    """Return a message as chat templates expect it."""
    calls: Sequence[dict[str, Any]] = [
        {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in message.calls
    ]
    reasoning = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return {
        "role": message.role,
        "content": message.text,
        **reasoning,
        **({"tool_calls": calls} if calls else {}),
    }
