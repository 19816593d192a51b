"""Sampled ids as text, bit by bit. Pure and synchronous.

Guarantees: the output of the streams of this module, joined, is the text of all ids, whatever the pieces in which they
came; of a character that is not complete, nothing is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
        """Return the text that has waited, and begin anew."""
        text = self.decode(self._ids)[self._returned :] if self._ids else ""
        self._ids, self._returned = [], 0
        return text

    def _forget(self, text: str) -> None:
        before, after = self._ids[: -_UNFINISHED - 1], self._ids[-_UNFINISHED - 1 :]
        head, tail = self.decode(before), self.decode(after)
        if head + tail == text and len(head) <= self._returned:
            self._ids, self._returned = after, self._returned - len(head)


class _StopMatcher:
    """Finds a string in a text that comes in pieces; looks at each character once (Knuth, Morris and Pratt)."""

    __slots__ = ("_fallbacks", "is_found", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """How many characters at the end of the text begin the string."""
        self.is_found = False
        self._fallbacks = _fallbacks(stop)

    def push(self, text: str) -> int | None:
        """Return where in this piece the string ends for the first time, if it does."""
        stop, matched = self.stop, self.matched
        if len(text) > len(stop):
            at = (stop[:matched] + text).find(stop)
            if at >= 0:
                self.is_found, self.matched = True, 0
                return at - matched + len(stop)
            matched, text = 0, text[len(text) - len(stop) + 1 :]
        for place, character in enumerate(text, 1):
            while matched and stop[matched] != character:
                matched = self._fallbacks[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                self.is_found, self.matched = True, 0
                return place
        self.matched = matched
        return None


@lru_cache(maxsize=64)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return for each beginning of a string the length of the longest shorter one that it ends with."""
    lengths = [0]
    for character in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == character))
    return tuple(lengths)


class StopFilter:
    """Cuts a text at the first of some strings; the possible beginning of one waits."""

    __slots__ = ("_first", "_held", "_matchers", "_read", "found", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Search for these strings, none of which is empty."""
        self.stops = stops
        self.found: str | None = None
        """The string that was found; nothing is returned after it."""
        self._matchers = [_StopMatcher(stop) for stop in stops]
        self._read = 0
        """The number of characters so far."""
        self._held = ""
        self._first: tuple[int, str] | None = None
        """Where the first string begins, of those that were read to their end, and the string."""

    def push(self, text: str) -> str:
        """Return the text of which no stop string is a part."""
        if not self._matchers:
            return text
        if self.found is not None:
            return ""
        self._find(text)
        text = self._held + text
        waits = max([matcher.matched for matcher in self._matchers if not matcher.is_found], default=0)
        if self._first is not None and self._first[0] <= self._read - waits:
            return self._cut(text, self._first)  # nothing that waits may begin before it
        self._held = text[len(text) - waits :]
        return text[: len(text) - waits]

    def end(self) -> str:
        """Return the text that has waited."""
        text, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return text if self._first is None or self.found is not None else self._cut(text, self._first)

    def _find(self, text: str) -> None:
        for matcher in self._matchers:
            if not matcher.is_found and (end := matcher.push(text)) is not None:
                begin = self._read + end - len(matcher.stop)
                if self._first is None or (begin, len(matcher.stop)) < (self._first[0], len(self._first[1])):
                    self._first = begin, matcher.stop
        self._read += len(text)

    def _cut(self, text: str, first: tuple[int, str]) -> str:
        """Return a text that ends with the last character that was read, up to where the first string begins."""
        begin, self.found = first
        self._held = ""
        return text[: len(text) - (self._read - begin)]


@dataclass(slots=True)
class Trim:
    """Removes the white space around a text; characters that may be at its end wait."""

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
        """Send the text that has waited, because a control token follows; strings may begin here only if the text
        `goes_on`."""
        self._pass(self._stream.end(), 0)
        if not goes_on:
            for place, each in enumerate(self._filters):
                self._pass(each.end(), place + 1)

    def _pass(self, text: str, begin: int) -> None:
        for each in self._filters[begin:]:
            text = each.push(text)
        self._send(self._trim.push(text))
