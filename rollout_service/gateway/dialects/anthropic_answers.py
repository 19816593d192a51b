"""Writes answers of Anthropic's Messages; `CODEC` is this API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from api_schemas.trajectories import FinishReason
from rollout_service.gateway.bounds import BoundedFields
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
    raw_call_text,
)
from rollout_service.gateway.dialects.answers import TextPart, WholeAnswer
from rollout_service.gateway.dialects.anthropic_requests import PARAMETERS, THREAD, read_call
from rollout_service.gateway.dialects.base import (
    COMMENT,
    AnswerStream,
    DialectCodec,
    ListedModel,
    describe_failure,
    sse,
)
from rollout_service.gateway.dialects.fields import parse_object
from rollout_service.gateway.errors import ContextOverflowError, RefusedParameterError

_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"


class MessageStream(AnswerStream):
    """One block is open at a time."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._turn_key = ""
        self._begun = False
        self._block = -1
        self._open: str | None = None
        self._calls = 0

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case AnswerBegin():
                return self._begin(event)
            case ReasoningDelta(text):
                return self._in_block(_THINKING) + self._delta("thinking_delta", "thinking", text)
            case TextDelta(text):
                return self._in_block(_TEXT) + self._delta("text_delta", "text", text)
            case CallBegin():
                return self._begin_call(event)
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text)
            case CallEnd():
                return self._close()
            case AnswerEnd():
                return self._end(event)

    def keep_alive(self) -> bytes:
        """Send an empty delta, the only thing that Claude Code waits for; open a block of text if none is."""
        if not self._begun:
            return COMMENT
        opened = b"" if self._open else self._in_block(_TEXT)
        match self._open:
            case "thinking":
                return opened + self._delta("thinking_delta", "thinking", "")
            case "tool_use":
                return opened + self._delta("input_json_delta", "partial_json", "")
        return opened + self._delta("text_delta", "text", "")

    def fail(self, error: BaseException) -> bytes:
        return _event("error", error=error_object(error))

    def _begin(self, event: AnswerBegin) -> bytes:
        self._begun, self._turn_key = True, event.turn_key
        cost = AnswerUsage(prompt_tokens=event.prompt_tokens, cached_tokens=0, sampled_tokens=0)
        message = _message(self._call, event.turn_key) | {"usage": usage(cost)}
        return _event("message_start", message=message)

    def _begin_call(self, event: CallBegin) -> bytes:
        self._calls += 1
        block = {"type": _TOOL_USE, "id": event.call_id, "name": event.name, "input": {}}
        return self._close() + self._start(block)

    def _in_block(self, form: str) -> bytes:
        if self._open == form:
            return b""
        empty = {"type": _THINKING, "thinking": "", "signature": ""}
        return self._close() + self._start({"type": _TEXT, "text": ""} if form == _TEXT else empty)

    def _start(self, block: dict[str, Any]) -> bytes:
        self._block += 1
        self._open = block["type"]
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, form: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta={"type": form, field: text})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._open == _THINKING
        self._open = None
        signature = self._delta("signature_delta", "signature", self._turn_key) if signed else b""
        return signature + _event("content_block_stop", index=self._block)

    def _end(self, event: AnswerEnd) -> bytes:
        return b"".join(
            (
                self._close(),
                _event("message_delta", delta=_stop(event, self._calls), usage=usage(event.usage)),
                _event("message_stop"),
            )
        )


def whole_message(call: ModelCall, answer: WholeAnswer) -> bytes:
    """Write a call whose arguments are not an object as text, since JSON cannot hold it."""
    blocks = [_whole_block(part, answer) for part in answer.parts]
    calls = sum(block["type"] == _TOOL_USE for block in blocks)
    message = _message(call, answer.begin.turn_key) | {"content": blocks}
    return orjson.dumps(message | _stop(answer.finish, calls) | {"usage": usage(answer.finish.usage)})


def _whole_block(part: Any, answer: WholeAnswer) -> dict[str, Any]:
    if isinstance(part, TextPart):
        if part.is_reasoning:
            return {"type": _THINKING, "thinking": part.text, "signature": answer.begin.turn_key}
        return {"type": _TEXT, "text": part.text}
    arguments = parse_object(part.arguments)
    if arguments is None:
        return {"type": _TEXT, "text": raw_call_text(part.name, part.arguments)}
    return {"type": _TOOL_USE, "id": part.call_id, "name": part.name, "input": arguments}


def _message(call: ModelCall, turn_key: str) -> dict[str, Any]:
    return {
        "id": f"msg_{turn_key}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(end: AnswerEnd, calls: int) -> dict[str, Any]:
    if end.finish is FinishReason.LENGTH:
        reason = "max_tokens"
    elif calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if end.stopped_by is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": end.stopped_by if reason == "stop_sequence" else None}


def usage(cost: AnswerUsage) -> dict[str, int]:
    """Leave cached tokens of the prompt out of `input_tokens`."""
    return {
        "input_tokens": cost.prompt_tokens - cost.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cost.cached_tokens,
        "output_tokens": cost.sampled_tokens,
    }


def _event(form: str, **fields: Any) -> bytes:
    return sse({"type": form, **fields}, form)


_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def error_object(error: BaseException) -> dict[str, Any]:
    status, message = describe_failure(error)
    if isinstance(error, ContextOverflowError):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_length} maximum"
    told: dict[str, Any] = {"type": _TYPES.get(HTTPStatus(status), "invalid_request_error"), "message": message}
    if isinstance(error, RefusedParameterError) and error.fields[0].path == THREAD:
        # At this code, Anthropic's client sends the whole history.
        told["details"] = {"error_code": "thread_unsupported_request"}
    return told


def _model(model: ListedModel) -> dict[str, Any]:
    described = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return described | ({"max_input_tokens": model.context_length} if model.context_length else {})


def _models(models: list[dict[str, Any]]) -> dict[str, Any]:
    names = [model["id"] for model in models] or [None]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


CODEC = DialectCodec(
    dialect=Dialect.ANTHROPIC,
    parameters=PARAMETERS,
    bounded=BoundedFields(messages="messages", tools="tools", schema="output_format", stops="stop_sequences"),
    read=lambda body, headers, _: read_call(body, headers),
    open_stream=MessageStream,
    whole=lambda call, answers: whole_message(call, answers[0]),
    error_body=lambda error: {"type": "error", "error": error_object(error)},
    counted=lambda tokens: {"input_tokens": tokens},
    describe_model=_model,
    list_models=_models,
)
