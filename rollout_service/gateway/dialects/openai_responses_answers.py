"""Writes answers of Responses: every event in order, with the same ids of items in events and in the response."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
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
    DeclaredTool,
    Dialect,
    ModelCall,
    ReasoningDelta,
    TextDelta,
)
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import (
    COMMENT,
    AnswerStream,
    DialectCodec,
    error_object,
    openai_model,
    openai_models,
    sse,
)
from rollout_service.gateway.dialects.fields import custom_input, parse_object
from rollout_service.gateway.dialects.openai_responses_requests import PARAMETERS, item_id, read_call

_OPEN = "in_progress"


class ResponseStream(AnswerStream):
    """One item is open at a time."""

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
                return closed + self._begin(CallItem(self._turn_key, len(self._items), call_id, name, declared))
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd():
                return self._close("completed")
            case AnswerEnd():
                return self._end(event)

    def keep_alive(self) -> bytes:
        """Say that the response is in progress, which Codex waits for; it ignores comments."""
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
            "text": {"format": self._call.answer_format or {"type": "text"}},
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
    """Return the same response as at the end of a stream."""
    writer = ResponseStream(call)
    for event in answer.events():
        writer.write(event)
    return writer.body()


def usage(cost: AnswerUsage) -> dict[str, Any]:
    return {
        "input_tokens": cost.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cost.cached_tokens},
        "output_tokens": cost.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": cost.reasoning_tokens},
        "total_tokens": cost.prompt_tokens + cost.sampled_tokens,
    }


Events = list[tuple[str, dict[str, Any]]]


class Item(ABC):
    """An item of the output while it is written."""

    def __init__(self, prefix: str, turn_key: str, index: int) -> None:
        self.id = item_id(prefix, turn_key, index)
        self.final: dict[str, Any] = {}
        self._index = index
        self._turn_key = turn_key
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def opening(self) -> Events: ...

    @abstractmethod
    def delta(self, text: str) -> Events: ...

    @abstractmethod
    def closing(self, status: str) -> Events: ...

    def _where(self, **more: Any) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, **more}

    def _added(self, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "response.output_item.added", {"output_index": self._index, "item": item}

    def _done(self, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.final = item
        return "response.output_item.done", {"output_index": self._index, "item": item}


class ReasoningItem(Item):
    """Shown to clients as its own summary; its `encrypted_content` is the key of the turn."""

    def __init__(self, turn_key: str, index: int) -> None:
        super().__init__("rs", turn_key, index)

    def opening(self) -> Events:
        part = {"type": "summary_text", "text": ""}
        added = self._added({"type": "reasoning", "id": self.id, "summary": [], "status": "in_progress"})
        return [added, ("response.reasoning_summary_part.added", self._where(summary_index=0, part=part))]

    def delta(self, text: str) -> Events:
        self._texts.append(text)
        return [("response.reasoning_summary_text.delta", self._where(summary_index=0, delta=text))]

    def closing(self, status: str) -> Events:
        part = {"type": "summary_text", "text": self._text}
        item = {
            "type": "reasoning",
            "id": self.id,
            "summary": [part],
            "content": [{"type": "reasoning_text", "text": self._text}],
            "encrypted_content": self._turn_key,
            "status": status,
        }
        return [
            ("response.reasoning_summary_text.done", self._where(summary_index=0, text=self._text)),
            ("response.reasoning_summary_part.done", self._where(summary_index=0, part=part)),
            self._done(item),
        ]


class TextItem(Item):
    def __init__(self, turn_key: str, index: int) -> None:
        super().__init__("msg", turn_key, index)

    def opening(self) -> Events:
        added = self._added(self._message([], "in_progress"))
        return [added, ("response.content_part.added", self._where(content_index=0, part=_output_text("")))]

    def delta(self, text: str) -> Events:
        self._texts.append(text)
        return [("response.output_text.delta", self._where(content_index=0, delta=text, logprobs=[]))]

    def closing(self, status: str) -> Events:
        part = _output_text(self._text)
        return [
            ("response.output_text.done", self._where(content_index=0, text=self._text, logprobs=[])),
            ("response.content_part.done", self._where(content_index=0, part=part)),
            self._done(self._message([part], status)),
        ]

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class CallItem(Item):
    """A call in the form in which its tool was declared.

    Only functions take their arguments as they are sampled; the others need all of them.
    """

    def __init__(self, turn_key: str, index: int, call_id: str, name: str, declared: DeclaredTool | None) -> None:
        self._declared = declared or DeclaredTool("function", name)
        super().__init__(_PREFIXES[self._declared.kind], turn_key, index)
        self._call_id = call_id

    def opening(self) -> Events:
        return [self._added(self._item("", "in_progress"))] if self._declared.kind in ("function", "custom") else []

    def delta(self, text: str) -> Events:
        self._texts.append(text)
        if self._declared.kind != "function":
            return []
        return [("response.function_call_arguments.delta", self._where(delta=text))]

    def closing(self, status: str) -> Events:
        match self._declared.kind:
            case "function":
                return self._close_function(status)
            case "custom":
                return self._close_custom(status)
        if (arguments := parse_object(self._text)) is None:
            return [self._added(self._item("", "in_progress")), *self._close_function(status)]
        return self._close_own(arguments, status)

    def _close_function(self, status: str) -> Events:
        done = self._where(arguments=self._text, name=self._declared.name)
        return [("response.function_call_arguments.done", done), self._done(self._item(self._text, status))]

    def _close_custom(self, status: str) -> Events:
        text = custom_input(self._text)
        return [
            ("response.custom_tool_call_input.delta", self._where(delta=text)),
            ("response.custom_tool_call_input.done", self._where(input=text)),
            self._done(self._item(text, status)),
        ]

    def _close_own(self, arguments: dict[str, Any], status: str) -> Events:
        form = f"{self._declared.kind}_call"
        own: dict[str, Any] = {"execution": "client", "arguments": arguments}
        if self._declared.kind == "local_shell":
            own = {"action": {"type": "exec", "env": {}, **arguments}}
        item = {"type": form, "id": self.id, "call_id": self._call_id, **own}
        return [self._added(item | {"status": "in_progress"}), self._done(item | {"status": status})]

    def _item(self, text: str, status: str) -> dict[str, Any]:
        """Return a custom call, or that of a function, which stands for any call that its own form cannot hold."""
        is_custom = self._declared.kind == "custom"
        item = {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": self.id,
            "call_id": self._call_id,
            "name": self._declared.name,
            "status": status,
            "input" if is_custom else "arguments": text,
        }
        return item | ({"namespace": self._declared.namespace} if self._declared.namespace else {})


_PREFIXES = {"function": "fc", "custom": "ctc", "local_shell": "lsc", "tool_search": "tsc"}


CODEC = DialectCodec(
    dialect=Dialect.RESPONSES,
    parameters=PARAMETERS,
    bounded=BoundedFields(messages="input", tools="tools", schema="text.format"),
    read=lambda body, headers, _: read_call(body, headers),
    open_stream=ResponseStream,
    whole=lambda call, answers: whole_response(call, answers[0]),
    error_body=lambda error: {"error": error_object(error)},
    counted=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    describe_model=openai_model,
    list_models=openai_models,
)
