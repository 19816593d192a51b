"""Sampled ids as text, bit by bit. Pure and synchronous.

Guarantees: what the streams of this module return, joined, is the text of all ids, whatever the pieces in which they
came; of a character that is not complete, nothing is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED = 3
"""The largest number of bytes that a character may lack, or have."""
_WINDOW = 24
"""The number of ids after which those that are complete are forgotten, though they do not decode to valid UTF-8."""


@dataclass(slots=True)
class TextStream:
    """Decodes ids; a character that the last ids may have begun waits."""

    decode: Callable[[Sequence[int]], str]
    _ids: list[int] = field(default_factory=list)
    _returned: int = 0
    """How many characters of the text of `_ids` were returned."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
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
        """Return what has waited, and begin anew."""
        text = self.decode(self._ids)[self._returned :] if self._ids else ""
        self._ids, self._returned = [], 0
        return text

    def _forget(self, text: str) -> None:
        before, after = self._ids[: -_UNFINISHED - 1], self._ids[-_UNFINISHED - 1 :]
        head, tail = self.decode(before), self.decode(after)
        if head + tail == text and len(head) <= self._returned:
            self._ids, self._returned = after, self._returned - len(head)


@dataclass(slots=True)
class StopFilter:
    """Cuts a text at the first of some strings; what may be the beginning of one waits."""

    stops: tuple[str, ...]
    found: str | None = None
    """The string that was found; nothing is returned after it."""
    _held: str = ""

    def push(self, text: str) -> str:
        """Return the text of which no stop string is a part."""
        if not self.stops or self.found is not None:
            return "" if self.found is not None else text
        text = self._held + text
        waits = unfinished(text, self.stops)
        place = self._first(text)
        if place is not None and place[0] <= len(text) - waits:  # nothing that waits may begin before it
            return self._cut(text, place)
        self._held = text[len(text) - waits :]
        return text[: len(text) - waits]

    def end(self) -> str:
        """Return what has waited."""
        text, self._held = self._held, ""
        place = self._first(text)
        return text if place is None else self._cut(text, place)

    def _first(self, text: str) -> tuple[int, str] | None:
        places = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        return min(places, key=lambda place: place[0], default=None)

    def _cut(self, text: str, place: tuple[int, str]) -> str:
        at, self.found = place
        self._held = ""
        return text[:at]


@dataclass(slots=True)
class Trim:
    """Removes the white space around a text; what may be at its end waits."""

    _begun: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        """Return the text up to its last character that is not white space."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        whole = text.rstrip()
        self._held = text[len(whole) :]
        return whole


def unfinished(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins, but does not complete, one of the marks."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = (
        length for length in range(longest, 0, -1) if any(mark.startswith(text[-length:]) for mark in marks)
    )
    return next(ends, 0)


class Channel:
    """Reasoning or text on its way to a client: decoded, cut at strings, and without white space around it."""

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
        """Send the text that these ids complete."""
        self._pass(self._stream.push(ids), 0)

    def end_region(self, *, goes_on: bool) -> None:
        """Send what has waited, because a control token follows; strings may begin here only if the text `goes_on`."""
        self._pass(self._stream.end(), 0)
        if not goes_on:
            for place, each in enumerate(self._filters):
                self._pass(each.end(), place + 1)

    def _pass(self, text: str, begin: int) -> None:
        for each in self._filters[begin:]:
            text = each.push(text)
        self._send(self._trim.push(text))
