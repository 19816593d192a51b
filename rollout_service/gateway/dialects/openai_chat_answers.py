"""Writes answers of Chat Completions; `CODEC` is this API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
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
    TokenLogprob,
)
from rollout_service.gateway.dialects.answers import CallPart, WholeAnswer, summed_usage
from rollout_service.gateway.dialects.base import (
    COMMENT,
    AnswerStream,
    DialectCodec,
    error_object,
    openai_model,
    openai_models,
    sse,
)
from rollout_service.gateway.dialects.fields import custom_input
from rollout_service.gateway.dialects.openai_chat_requests import PARAMETERS, read_call

_DONE = b"data: [DONE]\n\n"


class ChatStream(AnswerStream):
    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._head: dict[str, Any] = {
            "id": "",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": call.model,
        }
        self._calls = 0
        self._custom: list[str] | None = None
        """Arguments so far of a custom tool's call, which is sent when it is complete."""

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case AnswerBegin(turn_key):
                self._head["id"] = f"chatcmpl-{turn_key}"
                return self._chunk({"role": "assistant", "content": ""})
            case ReasoningDelta(text):
                return self._chunk({"reasoning_content": text})
            case TextDelta(text):
                return self._chunk({"content": text})
            case CallBegin():
                return self._begin_call(event)
            case CallArguments(index, text):
                return self._arguments(index, text)
            case CallEnd(index):
                return self._end_call(index)
            case AnswerEnd():
                return self._end(event)

    def keep_alive(self) -> bytes:
        return COMMENT

    def fail(self, error: BaseException) -> bytes:
        return sse({"error": error_object(error)})

    def _begin_call(self, event: CallBegin) -> bytes:
        self._calls += 1
        head: dict[str, Any] = {"index": event.index, "id": event.call_id}
        declared = self._call.declared_tools.get(event.name)
        if declared and declared.kind == "custom":
            self._custom = []
            return self._tool_call(head | {"type": "custom", "custom": {"name": declared.name, "input": ""}})
        self._custom = None
        return self._tool_call(head | {"type": "function", "function": {"name": event.name, "arguments": ""}})

    def _arguments(self, index: int, text: str) -> bytes:
        if self._custom is None:
            return self._tool_call({"index": index, "function": {"arguments": text}})
        self._custom.append(text)
        return b""

    def _end_call(self, index: int) -> bytes:
        if self._custom is None:
            return b""
        text, self._custom = custom_input("".join(self._custom)), None
        return self._tool_call({"index": index, "custom": {"input": text}})

    def _end(self, event: AnswerEnd) -> bytes:
        chunks = self._chunk({}, finish_reason(event, self._calls), logprobs(self._call, event))
        if self._call.include_usage:
            chunks += sse(self._head | {"choices": [], "usage": usage(event.usage)})
        return chunks + _DONE

    def _tool_call(self, call: dict[str, Any]) -> bytes:
        return self._chunk({"tool_calls": [call]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse(self._head | {"choices": [choice if logprobs is None else choice | {"logprobs": logprobs}]})


def whole_completion(call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
    return orjson.dumps(
        {
            "id": f"chatcmpl-{answers[0].begin.turn_key}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": [_choice(call, index, answer) for index, answer in enumerate(answers)],
            "usage": usage(summed_usage(answers)),
        }
    )


def _choice(call: ModelCall, index: int, answer: WholeAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_whole_call(call, part) for part in answer.calls]
    finish = finish_reason(answer.finish, len(answer.calls))
    shown = logprobs(call, answer.finish)
    return {"index": index, "message": message, "finish_reason": finish, "logprobs": shown}


def _whole_call(call: ModelCall, part: CallPart) -> dict[str, Any]:
    declared = call.declared_tools.get(part.name)
    if declared and declared.kind == "custom":
        custom = {"name": declared.name, "input": custom_input(part.arguments)}
        return {"id": part.call_id, "type": "custom", "custom": custom}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.call_id, "type": "function", "function": function}


def finish_reason(end: AnswerEnd, calls: int) -> str:
    if end.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if calls else "stop"


def logprobs(call: ModelCall, end: AnswerEnd) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    return {"content": [_token(each) for each in end.logprobs], "refusal": None}


def _token(sampled: TokenLogprob) -> dict[str, Any]:
    return {"token": sampled.text, "logprob": sampled.logprob, "bytes": _bytes(sampled.text), "top_logprobs": ()}


@lru_cache(maxsize=4_096)
def _bytes(token: str) -> tuple[int, ...] | None:
    """Return None for a part of a character, whose bytes are not known."""
    return None if "\ufffd" in token else tuple(token.encode())


def usage(cost: AnswerUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.sampled_tokens,
        "total_tokens": cost.prompt_tokens + cost.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": cost.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": cost.reasoning_tokens},
    }


CODEC = DialectCodec(
    dialect=Dialect.CHAT,
    parameters=PARAMETERS,
    bounded=BoundedFields(messages="messages", tools="tools", schema="response_format", answers="n", stops="stop"),
    read=lambda body, headers, _: read_call(body, headers),
    open_stream=ChatStream,
    whole=whole_completion,
    error_body=lambda error: {"error": error_object(error)},
    counted=lambda tokens: {"count": tokens},
    describe_model=openai_model,
    list_models=openai_models,
)
