"""Sampled ids as text, bit by bit, with the calls in it and as its client receives it. Pure and synchronous.

The texts that a stream returns, joined, are that of all ids, however these were cut into pieces; of an incomplete
character, nothing is returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout_service.gateway.contract import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)


@dataclass(slots=True)
class SentCall:
    id: str
    name: str
    number: int
    """Its place among the parser's calls, malformed ones included."""
    arguments: str = ""
    error: str | None = None
    ended: bool = False


@dataclass(slots=True)
class SentAnswer:
    """An answer as its client has received it, and the events still to be sent."""

    reasoning: str = ""
    text: str = ""
    calls: list[SentCall] = field(default_factory=list)
    _events: list[AnswerEvent] = field(default_factory=list)

    def add_reasoning(self, text: str) -> None:
        if text:
            self.reasoning += text
            self._events.append(ReasoningDelta(text))

    def add_text(self, text: str) -> None:
        if text:
            self.text += text
            self._events.append(TextDelta(text))

    def begin_call(self, call_id: str, name: str, number: int) -> None:
        self._events.append(CallBegin(len(self.calls), call_id, name))
        self.calls.append(SentCall(call_id, name, number))

    def add_arguments(self, text: str) -> None:
        if text:
            self.calls[-1].arguments += text
            self._events.append(CallArguments(len(self.calls) - 1, text))

    def end_call(self, error: str | None = None) -> None:
        self.calls[-1].error, self.calls[-1].ended = error, True
        self._events.append(CallEnd(len(self.calls) - 1, error))

    def take(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED = 3
"""The most bytes that a character may lack."""
_WINDOW = 24
"""Ids after which complete ones are forgotten, though they do not decode to valid UTF-8."""


@dataclass(slots=True)
class TextStream:
    """Decodes ids; a character that the last ids may have begun waits."""

    decode: Callable[[Sequence[int]], str]
    _ids: list[int] = field(default_factory=list)
    _returned: int = 0
    """Characters of the text of `_ids` that were returned."""

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self.decode(self._ids)
        whole = len(text) - min(len(text) - len(text.rstrip(_REPLACEMENT)), _UNFINISHED)
        new = text[self._returned : whole]
        self._returned = max(self._returned, whole)
        if whole == len(text):
            self._ids, self._returned = [], 0
        elif len(self._ids) > _WINDOW:
            self._forget(text)
        return new

    def end(self) -> str:
        text = self.decode(self._ids)[self._returned :] if self._ids else ""
        self._ids, self._returned = [], 0
        return text

    def _forget(self, text: str) -> None:
        before, after = self._ids[: -_UNFINISHED - 1], self._ids[-_UNFINISHED - 1 :]
        head, tail = self.decode(before), self.decode(after)
        if head + tail == text and len(head) <= self._returned:
            self._ids, self._returned = after, self._returned - len(head)


class StopFilter:
    """Cuts a text at the first of some strings; the possible beginning of one waits, which bounds each look back."""

    __slots__ = ("_held", "found", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """No string may be empty."""
        self.stops = stops
        self.found: str | None = None
        """Nothing is returned after it."""
        self._held = ""

    def push(self, text: str) -> str:
        if not self.stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        waits = min([_begin_at_end(text, stop) for stop in self.stops])
        if (first := self._first(text)) and first[0] <= waits:  # nothing that waits may begin before it
            return self._cut(text, *first)
        self._held = text[waits:]
        return text[:waits]

    def end(self) -> str:
        text, self._held = self._held, ""
        return self._cut(text, *first) if (first := self._first(text)) else text

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return where the first string begins, and the shortest of those that begin there."""
        found = [(at, len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def _cut(self, text: str, at: int, stop: str) -> str:
        self.found, self._held = stop, ""
        return text[:at]


def _begin_at_end(text: str, stop: str) -> int:
    """Return where the end of a text may begin a string; the text's length if it cannot."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


@dataclass(slots=True)
class Trim:
    """Removes surrounding white space; characters that may be at its end wait."""

    _begun: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        whole = text.rstrip()
        self._held = text[len(whole) :]
        return whole


class Channel:
    """Decodes reasoning or text, cuts it at strings, and removes the white space around it."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        filters: Sequence[StopFilter],
        send: Callable[[str], None],
    ) -> None:
        self._stream = TextStream(decode)
        self._filters = filters
        self._trim = Trim()
        self._send = send

    def push(self, ids: Sequence[int]) -> None:
        self._pass(self._stream.push(ids), 0)

    def end_region(self, *, goes_on: bool) -> None:
        """Send what has waited, as a control token follows; strings may begin here only if the text `goes_on`."""
        self._pass(self._stream.end(), 0)
        if not goes_on:
            for place, each in enumerate(self._filters):
                self._pass(each.end(), place + 1)

    def _pass(self, text: str, begin: int) -> None:
        for each in self._filters[begin:]:
            text = each.push(text)
        self._send(self._trim.push(text))


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)+")\s*,\s*"arguments"\s*:\s*(?=\{)')
_LONGEST_HEAD = 1024
"""Characters after which no name is looked for."""
_STRUCTURE = re.compile(r'["{}\[\]\\]')


@dataclass(slots=True)
class JsonCall:
    """A tool call that is written as JSON, read as it is sampled.

    The form is `{"name": NAME, "arguments": OBJECT}`, in this order; any other call is read only once it is complete.
    """

    name: str | None = None
    """Known once the arguments have begun."""
    arguments: str = ""
    """The text of the arguments so far; at most up to their last brace."""
    _head: str = ""
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False
    _done: bool = False

    def push(self, text: str) -> str:
        """Return more of the arguments; nothing before the name is known, nor after their end."""
        if self.name is None:
            text = self._begin(text)
        if not text or self._done:
            return ""
        new = text[: self._scan(text)]
        self.arguments += new
        return new

    def _begin(self, text: str) -> str:
        """Return the beginning of the arguments, once they have begun."""
        if len(self._head) > _LONGEST_HEAD:
            return ""
        self._head += text
        head = _HEAD.match(self._head)
        if head is None:
            return ""
        try:
            name = str(json.loads(head[1]))
            name.encode()
        except ValueError:  # an escape that is none, or a lone surrogate
            return ""
        self.name = name
        return self._head[head.end() :]

    def _scan(self, text: str) -> int:
        """Return where the arguments end, or the text's length."""
        at = int(self._escaped)
        self._escaped = False
        while mark := _STRUCTURE.search(text, at):
            at = mark.end()
            if self._quoted and mark[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark[0] in "{[":
                self._depth += 1
            elif not self._quoted and mark[0] in "}]":
                self._depth -= 1
            if self._depth == 0:
                self._done = True
                return at
        return len(text)
