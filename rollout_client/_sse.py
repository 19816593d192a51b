"""Server-sent events, parsed as the WHATWG standard says ("Interpreting an event stream").

Guarantee: lines end at CR, LF or CRLF and nowhere else. `str.splitlines` also breaks at U+2028 and its like,
which JSON may hold unescaped, so it is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream."""

    event: str
    data: str
    id: str
    """The last id that the stream named, of this event or an earlier one."""


@dataclass(slots=True)
class SSEParser:
    """Turns chunks of bytes, cut anywhere, into events."""

    last_id: str = ""
    """The id to resume after: the last one that the stream named and closed by an empty line, with or without data."""
    _rest: bytes = b""
    _event: str = ""
    _id: str = ""
    _data: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Take the next chunk and yield the events that it completes."""
        *lines, self._rest = self._split(self._rest + chunk)
        for line in lines:
            event = self._line(line.decode("utf-8", errors="replace"))
            if event is not None:
                yield event

    @staticmethod
    def _split(data: bytes) -> list[bytes]:
        """Return the lines and the unfinished rest; a CR at the end waits, since it may be half of a CRLF."""
        held = b"\r" if data.endswith(b"\r") else b""
        parts = _LINE_END.split(data[: len(data) - len(held)])
        return [*parts[:-1], parts[-1] + held]

    def _line(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None  # a comment (an empty name), `retry`, or an unknown field

    def _dispatch(self) -> ServerSentEvent | None:
        event, data = self._event, self._data
        self._event, self._data = "", []
        self.last_id = self._id
        if not data:
            return None
        return ServerSentEvent(event=event or "message", data="\n".join(data), id=self._id)
