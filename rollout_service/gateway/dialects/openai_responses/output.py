"""The items of a response: the events that open, fill and close each, and the item in its last form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollout_service.gateway.contract import DeclaredTool
from rollout_service.gateway.dialects.content import custom_input
from rollout_service.gateway.dialects.fields import parse_object
from rollout_service.gateway.dialects.openai_responses.items import item_id

Events = list[tuple[str, dict[str, Any]]]
"""Types of events, each with its fields."""


class Item(ABC):
    """One item of the output while it is written."""

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
    def opening(self) -> Events:
        """Return the events before the first delta."""

    @abstractmethod
    def delta(self, text: str) -> Events:
        """Add to the item's text, and return the events."""

    @abstractmethod
    def closing(self, status: str) -> Events:
        """Make the item final, and return the events that say so."""

    def _where(self, **more: Any) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, **more}

    def _added(self, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "response.output_item.added", {"output_index": self._index, "item": item}

    def _done(self, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.final = item
        return "response.output_item.done", {"output_index": self._index, "item": item}


class ReasoningItem(Item):
    """Reasoning, shown to clients as its own summary; its `encrypted_content` is the key of the turn."""

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
    """A message."""

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
    """A tool call in the form in which its tool was declared.

    Only functions take their arguments as they are sampled; the others need all of them.
    """

    def __init__(
        self, turn_key: str, index: int, call_id: str, name: str, declared: DeclaredTool | None
    ) -> None:
        self._declared = declared or DeclaredTool("function", name)
        super().__init__(_PREFIXES[self._declared.kind], turn_key, index)
        self._call_id = call_id

    def opening(self) -> Events:
        match self._declared.kind:
            case "function":
                return [self._added(self._function("", "in_progress"))]
            case "custom":
                return [self._added(self._custom("", "in_progress"))]
        return []

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
            return [self._added(self._function("", "in_progress")), *self._close_function(status)]
        return self._close_own(arguments, status)

    def _close_function(self, status: str) -> Events:
        done = self._where(arguments=self._text, name=self._declared.name)
        return [
            ("response.function_call_arguments.done", done),
            self._done(self._function(self._text, status)),
        ]

    def _close_custom(self, status: str) -> Events:
        text = custom_input(self._text)
        return [
            ("response.custom_tool_call_input.delta", self._where(delta=text)),
            ("response.custom_tool_call_input.done", self._where(input=text)),
            self._done(self._custom(text, status)),
        ]

    def _close_own(self, arguments: dict[str, Any], status: str) -> Events:
        form = f"{self._declared.kind}_call"
        own: dict[str, Any] = {"execution": "client", "arguments": arguments}
        if self._declared.kind == "local_shell":
            own = {"action": {"type": "exec", "env": {}, **arguments}}
        item = {"type": form, "id": self.id, "call_id": self._call_id, **own}
        return [self._added(item | {"status": "in_progress"}), self._done(item | {"status": status})]

    def _function(self, arguments: str, status: str) -> dict[str, Any]:
        return self._named("function_call", status) | {"arguments": arguments}

    def _custom(self, text: str, status: str) -> dict[str, Any]:
        return self._named("custom_tool_call", status) | {"input": text}

    def _named(self, form: str, status: str) -> dict[str, Any]:
        item = {
            "type": form,
            "id": self.id,
            "call_id": self._call_id,
            "name": self._declared.name,
            "status": status,
        }
        return item | ({"namespace": self._declared.namespace} if self._declared.namespace else {})


_PREFIXES = {"function": "fc", "custom": "ctc", "local_shell": "lsc", "tool_search": "tsc"}
