"""Writes answers of Responses: every event in order, with the same ids of items in events and in the response."""

from __future__ import annotations

import time
from typing import Any

import orjson

from api_schemas.trajectories import FinishReason
from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    CallArguments,
    CallBegin,
    CallEnd,
    ModelCall,
    ReasoningDelta,
    TextDelta,
)
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import COMMENT, AnswerStream, sse
from rollout_service.gateway.dialects.openai_common import error_object
from rollout_service.gateway.dialects.openai_responses.output import CallItem, Item, ReasoningItem, TextItem

_OPEN = "in_progress"


class ResponseStream(AnswerStream):
    """A stream of the events of a response. One item is open at a time."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._turn_key = ""
        self._begun = False
        self._created = int(time.time())
        self._number = 0
        self._items: list[Item] = []
        self._open: Item | None = None
        self._final: dict[str, Any] = {}

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case AnswerBegin(turn_key):
                self._turn_key, self._begun = turn_key, True
                return self._status("response.created") + self._status("response.in_progress")
            case ReasoningDelta(text):
                return self._add(ReasoningItem, text)
            case TextDelta(text):
                return self._add(TextItem, text)
            case CallBegin(_, call_id, name):
                closed = self._close("completed")
                declared = self._call.declared_tools.get(name)
                return closed + self._begin(
                    CallItem(self._turn_key, len(self._items), call_id, name, declared)
                )
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd():
                return self._close("completed")
            case AnswerEnd():
                return self._end(event)

    def keep_alive(self) -> bytes:
        """Return an event that says that the response is in progress, which Codex waits for; comments it ignores."""
        return self._status("response.in_progress") if self._begun else COMMENT

    def fail(self, error: BaseException) -> bytes:
        told = error_object(error)
        failed = {"code": told["code"], "message": told["message"]}
        return self._event("response.failed", response=self._response("failed") | {"error": failed})

    def body(self) -> bytes:
        """Return the response without its stream; the answer must have ended."""
        return orjson.dumps(self._final)

    def _add(self, form: type[ReasoningItem | TextItem], text: str) -> bytes:
        if isinstance(self._open, form):
            return self._delta(text)
        opened = self._close("completed") + self._begin(form(self._turn_key, len(self._items)))
        return opened + self._delta(text)

    def _begin(self, item: Item) -> bytes:
        self._open = item
        return self._events(item.opening())

    def _delta(self, text: str) -> bytes:
        return self._events(self._open.delta(text)) if self._open else b""

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item, self._open = self._open, None
        self._items.append(item)
        return self._events(item.closing(status))

    def _end(self, event: AnswerEnd) -> bytes:
        cut = event.finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        closed = self._close(status)
        reason = {"reason": "max_output_tokens"} if cut else None
        self._final = self._response(status) | {"incomplete_details": reason, "usage": usage(event.usage)}
        return closed + self._event(f"response.{status}", response=self._final)

    def _status(self, form: str) -> bytes:
        return self._event(form, response=self._response(_OPEN))

    def _response(self, status: str) -> dict[str, Any]:
        done = status != _OPEN
        return {
            "id": f"resp_{self._turn_key}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self._call.model,
            "output": [item.final for item in self._items] if done else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }

    def _events(self, events: list[tuple[str, dict[str, Any]]]) -> bytes:
        return b"".join(self._event(form, **fields) for form, fields in events)

    def _event(self, form: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": form, "sequence_number": self._number - 1, **fields}, form)


def whole_response(call: ModelCall, answer: WholeAnswer) -> bytes:
    """Return the body of a response, with what its stream would have ended with."""
    writer = ResponseStream(call)
    for event in answer.events():
        writer.write(event)
    return writer.body()


def usage(cost: AnswerUsage) -> dict[str, Any]:
    """Return what an answer cost."""
    return {
        "input_tokens": cost.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cost.cached_tokens},
        "output_tokens": cost.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": cost.reasoning_tokens},
        "total_tokens": cost.prompt_tokens + cost.sampled_tokens,
    }
