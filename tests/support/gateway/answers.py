"""Requests and answers that the tests of the gateway's dialects share."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from api_schemas.trajectories import FinishReason
from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    CallArguments,
    CallBegin,
    CallEnd,
    Dialect,
    ModelCall,
    ReasoningDelta,
    TextDelta,
)
from rollout_service.gateway.dialects import CODECS, WholeAnswer

USAGE = AnswerUsage(prompt_tokens=100, cached_tokens=60, sampled_tokens=20, reasoning_tokens=5)
KEY = "turn-7"
REASONING, TEXT = "First, look.", "\n\nI will look. ✓ "
CALLS = (("call_0", "bash", '{ "command" : "na\\u00efve" }'), ("call_1", "read", '{"path":"a"}'))


def read(
    dialect: Dialect, body: Any, headers: dict[str, str] | None = None, path: str = "/v1beta/models/m:x"
) -> ModelCall:
    """Read a request; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CODECS[dialect].read(content, headers or {}, path)


def pieces(delta: Callable[[str], AnswerEvent], text: str) -> list[AnswerEvent]:
    """Cut a text into deltas of two characters."""
    return [delta(text[start : start + 2]) for start in range(0, len(text), 2)]


def call(index: int, call_id: str, name: str, arguments: str, error: str | None = None) -> list[AnswerEvent]:
    """Return the events of a tool call."""
    deltas = pieces(lambda text: CallArguments(index, text), arguments)
    return [CallBegin(index, call_id, name), *deltas, CallEnd(index, error)]


def answer(
    *parts: list[AnswerEvent], finish: FinishReason = FinishReason.STOP, stopped_by: str | None = None
) -> list[AnswerEvent]:
    """Return the events of an answer."""
    middle = [event for part in parts for event in part]
    return [AnswerBegin(KEY, 100), *middle, AnswerEnd(finish, USAGE, stopped_by)]


def full_answer() -> list[AnswerEvent]:
    """Return an answer with a thought, a text and two calls."""
    calls = [event for index, (call_id, name, text) in enumerate(CALLS) for event in call(index, call_id, name, text)]
    return answer(pieces(ReasoningDelta, REASONING), pieces(TextDelta, TEXT), calls)


def stream(request: ModelCall, events: Sequence[AnswerEvent]) -> bytes:
    """Write a stream."""
    writer = CODECS[request.dialect].open_stream(request)
    return b"".join(writer.write(event) for event in events)


def whole(request: ModelCall, *answers: Sequence[AnswerEvent]) -> Any:
    """Write a whole answer, and return it as JSON."""
    parts = [WholeAnswer.of(events) for events in answers]
    return json.loads(CODECS[request.dialect].whole(request, parts))


def sse_events(content: bytes) -> list[tuple[str | None, Any]]:
    """Read server-sent events without their comments: each with its name, an end marker as text."""
    events = []
    for block in content.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            data = fields["data"]
            events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events
