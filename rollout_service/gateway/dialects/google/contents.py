"""Reads the contents of Google's generateContent: lists of parts, in which answers to calls may lack an id."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from rollout_service.gateway.contract import ClientMessage, ClientToolCall
from rollout_service.gateway.dialects.content import BETWEEN_PARTS, unsupported
from rollout_service.gateway.dialects.fields import Fields, as_fields, dump_json, invalid
from rollout_service.gateway.dialects.google.signatures import read_signature
from rollout_service.gateway.dialects.parameters import Sorted

_MEDIA = {"inlineData": "an image or a sound", "fileData": "a file"}
_RESULTS = ("output", "result", "content", "error")
"""The names under which clients put the text of a function's response."""


def camel_case(fields: Fields) -> Fields:
    """Return an object with the names that Google's API writes; it accepts the spelling with underscores too."""
    if not any("_" in name for name in fields.values):
        return fields
    return Fields({_camel(name): value for name, value in fields.values.items()}, fields.path)


def _camel(name: str) -> str:
    first, *rest = name.lstrip("_").split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


class _OpenCalls:
    """Calls of one answer that are not answered yet. To find one takes no longer if there are many."""

    def __init__(self, calls: Sequence[ClientToolCall] = ()) -> None:
        self._calls = calls
        self._answered: set[int] = set()
        self._places: dict[tuple[str | None, str | None], deque[int]] = defaultdict(deque)
        """The places of the calls by id and name, of which each may be None for any."""
        for place, call in enumerate(calls):
            for key in product({call.id, None}, (call.name, None)):
                self._places[key].append(place)

    def take(self, call_id: str | None, name: str) -> ClientToolCall | None:
        """Return the first call with this id, or any id for None: one with this name, if there is one."""
        for key in ((call_id, name), (call_id, None)):
            places = self._places.get(key, deque())
            while places:
                place = places.popleft()
                if place not in self._answered:
                    self._answered.add(place)
                    return self._calls[place]
        return None


class ContentReader:
    """Reads the contents of one request."""

    def __init__(self, notes: Sorted) -> None:
        self._notes = notes
        self._open_calls = _OpenCalls()
        """Those of the last answer, for responses without an id."""

    def read(self, fields: Fields) -> Iterator[ClientMessage]:
        """Yield the messages; each response of a function is a message of its own."""
        for content in fields.objects("contents"):
            role = content.text("role") or "user"
            if role == "model":
                yield self._model(content)
            elif role in ("user", "function"):
                yield from self._user(content)
            else:
                invalid(content.at("role"), "must be user or model")

    def system(self, fields: Fields) -> str:
        """Return the text of the system instruction."""
        value = fields.values.get("systemInstruction")
        if value is None or isinstance(value, str):
            return value or ""
        content = as_fields(value, "systemInstruction")
        texts = (self._text(part) for part in _parts(content))
        return BETWEEN_PARTS.join(text for text in texts if text is not None)

    def _model(self, content: Fields) -> ClientMessage:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ClientToolCall] = []
        turn_key: str | None = None
        for part in _parts(content):
            signed_call = None
            if signature := part.text("thoughtSignature"):
                turn_key, signed_call = read_signature(signature)
            if call := part.object("functionCall"):
                calls.append(_call(call, signed_call))
            elif (text := self._text(part)) is not None:
                (thoughts if part.boolean("thought") else texts).append(text)
        self._open_calls = _OpenCalls(calls)
        reasoning = "".join(thoughts) or None
        return ClientMessage("assistant", "".join(texts), reasoning, tuple(calls), turn_key=turn_key)

    def _user(self, content: Fields) -> Iterator[ClientMessage]:
        texts: list[str] = []
        for part in _parts(content):
            if response := part.object("functionResponse"):
                if texts:
                    yield ClientMessage("user", BETWEEN_PARTS.join(texts))
                    texts = []
                yield self._response(response)
            elif (text := self._text(part)) is not None:
                texts.append(text)
        if texts:
            yield ClientMessage("user", BETWEEN_PARTS.join(texts))

    def _response(self, response: Fields) -> ClientMessage:
        name = response.required_text("name")
        if any(_MEDIA.keys() & camel_case(part).values.keys() for part in response.objects("parts")):
            unsupported(response.at("parts"), "not only text")
        call_id = self._answered(response.text("id") or None, name)
        return ClientMessage(
            "tool", _result(response.values.get("response")), call_id=call_id, tool_name=name
        )

    def _answered(self, call_id: str | None, name: str) -> str | None:
        """Return the id of the call that a response answers: the one that it names, else the first open one."""
        call = self._open_calls.take(call_id, name)
        return call_id or (call.id if call else None)

    def _text(self, part: Fields) -> str | None:
        if (text := part.text("text")) is not None:
            return text
        for name in part.values:
            if name in _MEDIA:
                unsupported(part.path, _MEDIA[name])
            if name not in ("thought", "thoughtSignature"):
                self._notes.ignore(f"contents[].parts[].{name}")
        return None


def _parts(content: Fields) -> Iterator[Fields]:
    for part in content.objects("parts"):
        yield camel_case(part)


def _call(call: Fields, signed_id: str | None) -> ClientToolCall:
    arguments = call.object("args")
    text = dump_json(arguments.values if arguments else {})
    return ClientToolCall(call.text("id") or signed_id, call.required_text("name"), text)


def _result(response: Any) -> str:
    """Return the text of a function's response; an object that holds more than one text as JSON."""
    if isinstance(response, dict):
        for name in _RESULTS:
            if isinstance(text := response.get(name), str) and not response.keys() - {name, "name"}:
                return text
    return "" if response is None else dump_json(response)
