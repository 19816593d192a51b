"""Writes answers of Google's generateContent; `CODEC` is this API."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson

from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import InvalidFieldError
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
from rollout_service.gateway.dialects.answers import CallPart, TextPart, WholeAnswer, summed_usage
from rollout_service.gateway.dialects.base import (
    AnswerStream,
    DialectCodec,
    ListedModel,
    describe_failure,
    sse,
)
from rollout_service.gateway.dialects.fields import parse_object
from rollout_service.gateway.dialects.google_requests import PARAMETERS, read_call, sign
from rollout_service.gateway.errors import ContextOverflowError


class CandidateStream(AnswerStream):
    """A stream of responses of one candidate, each with the new parts."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._turn_key = ""
        self._open_call = CallPart("", "")
        self._calls = 0
        self._sent = 0
        self.media_type = "text/event-stream" if call.server_sent_events else "application/json"

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case AnswerBegin(turn_key):
                self._turn_key = turn_key
                return b""
            case ReasoningDelta(text):
                return self._parts({"text": text, "thought": True})
            case TextDelta(text):
                return self._parts({"text": text})
            case CallBegin(_, call_id, name):
                self._open_call = CallPart(call_id, name)
                return b""
            case CallArguments(_, text):
                self._open_call.arguments += text
                return b""
            case CallEnd():
                return self._end_call()
            case AnswerEnd():
                return self._end(event)

    def keep_alive(self) -> bytes:
        """Send an empty part; comments break the stream for Gemini CLI."""
        return self._parts({"text": ""})

    def fail(self, error: BaseException) -> bytes:
        return self._frame({"error": error_object(error)}) + self._closing()

    def _end_call(self) -> bytes:
        part = _call_part(self._open_call, self._turn_key)
        self._calls += "functionCall" in part
        return self._parts(part)

    def _end(self, event: AnswerEnd) -> bytes:
        last = {"text": ""} if self._calls else {"text": "", "thoughtSignature": sign(self._turn_key)}
        response = self._response([last])
        response["candidates"][0]["finishReason"] = _finish_reason(event)
        return self._frame(response | {"usageMetadata": usage(event.usage)}) + self._closing()

    def _parts(self, *parts: dict[str, Any]) -> bytes:
        return self._frame(self._response(list(parts)))

    def _response(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        candidate = {"content": {"parts": parts, "role": "model"}, "index": 0}
        return _response(self._call, [candidate], self._turn_key)

    def _frame(self, response: dict[str, Any]) -> bytes:
        self._sent += 1
        if self._call.server_sent_events:
            return sse(response)
        return (b"[" if self._sent == 1 else b",\r\n") + orjson.dumps(response)

    def _closing(self) -> bytes:
        return b"" if self._call.server_sent_events else b"]"


def whole_content(call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
    candidates = [_candidate(index, answer) for index, answer in enumerate(answers)]
    response = _response(call, candidates, answers[0].begin.turn_key)
    return orjson.dumps(response | {"usageMetadata": usage(summed_usage(answers))})


def _candidate(index: int, answer: WholeAnswer) -> dict[str, Any]:
    turn_key = answer.begin.turn_key
    parts = [_part(part, turn_key) for part in answer.parts]
    if parts and not any("functionCall" in part for part in parts):
        parts[-1] |= {"thoughtSignature": sign(turn_key)}
    content = {"parts": parts, "role": "model"}
    return {"content": content, "index": index, "finishReason": _finish_reason(answer.finish)}


def _part(part: TextPart | CallPart, turn_key: str) -> dict[str, Any]:
    if isinstance(part, CallPart):
        return _call_part(part, turn_key)
    return {"text": part.text, "thought": True} if part.is_reasoning else {"text": part.text}


def _call_part(call: CallPart, turn_key: str) -> dict[str, Any]:
    """Write a call as text if its arguments are not an object, since this API can carry no others."""
    arguments = parse_object(call.arguments)
    if arguments is None:
        return {"text": raw_call_text(call.name, call.arguments)}
    function = {"id": call.call_id, "name": call.name, "args": arguments}
    return {"functionCall": function, "thoughtSignature": sign(turn_key, call.call_id)}


def _response(call: ModelCall, candidates: list[dict[str, Any]], turn_key: str) -> dict[str, Any]:
    return {"candidates": candidates, "modelVersion": call.model, "responseId": turn_key}


def _finish_reason(end: AnswerEnd) -> str:
    return "MAX_TOKENS" if end.finish is FinishReason.LENGTH else "STOP"


def usage(cost: AnswerUsage) -> dict[str, int]:
    """Leave thoughts out of the candidates' tokens."""
    return {
        "promptTokenCount": cost.prompt_tokens,
        "cachedContentTokenCount": cost.cached_tokens,
        "candidatesTokenCount": cost.sampled_tokens - cost.reasoning_tokens,
        "thoughtsTokenCount": cost.reasoning_tokens,
        "totalTokenCount": cost.prompt_tokens + cost.sampled_tokens,
    }


_STATUSES = {
    HTTPStatus.UNAUTHORIZED: "UNAUTHENTICATED",
    HTTPStatus.FORBIDDEN: "PERMISSION_DENIED",
    HTTPStatus.NOT_FOUND: "NOT_FOUND",
    HTTPStatus.GONE: "NOT_FOUND",
    HTTPStatus.INTERNAL_SERVER_ERROR: "INTERNAL",
    HTTPStatus.TOO_MANY_REQUESTS: "RESOURCE_EXHAUSTED",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
}


def error_object(error: BaseException) -> dict[str, Any]:
    status, message = describe_failure(error)
    if isinstance(error, ContextOverflowError):
        message = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.context_length})."
        )
    told: dict[str, Any] = {
        "code": status,
        "message": message,
        "status": _STATUSES.get(HTTPStatus(status), "INVALID_ARGUMENT"),
    }
    if isinstance(error, InvalidFieldError):
        violations = [{"field": field.path, "description": field.message} for field in error.fields]
        detail = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
        told["details"] = [detail]
    return told


_METHODS = ("generateContent", "streamGenerateContent", "countTokens")


def _model(model: ListedModel) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": f"models/{model.name}",
        "displayName": model.name,
        "version": "1",
        "supportedGenerationMethods": _METHODS,
    }
    limits = {"inputTokenLimit": model.context_length, "outputTokenLimit": model.context_length}
    return described | (limits if model.context_length else {})


CODEC = DialectCodec(
    dialect=Dialect.GOOGLE,
    parameters=PARAMETERS,
    bounded=BoundedFields(
        messages="contents",
        tools="tools",
        schema="generationConfig.responseSchema",
        answers="generationConfig.candidateCount",
        stops="generationConfig.stopSequences",
    ),
    read=read_call,
    open_stream=CandidateStream,
    whole=whole_content,
    error_body=lambda error: {"error": error_object(error)},
    counted=lambda tokens: {"totalTokens": tokens},
    describe_model=_model,
    list_models=lambda models: {"models": models},
)
