"""The service's events, followed through lost connections; and the parser of their stream.

Each event is given once and in order, from the first connection on. The stream is parsed as the WHATWG standard says
("Interpreting an event stream"): lines end only at CR, LF or CRLF. `str.splitlines` also breaks at U+2028 and its like,
which JSON may hold unescaped.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

import httpx

from api_schemas.events import Event
from rollout_client._answers import error_from, parse
from rollout_client._connection import Connection
from rollout_client.errors import UnavailableError

SILENCE_SECONDS = 60.0
"""A stream that sends nothing for this long, not even a comment, counts as dead and is opened again."""


async def follow_events(
    connection: Connection, query: Mapping[str, Sequence[str]], *, after: int | str | None, follow: bool
) -> AsyncGenerator[Event]:
    """Yield events, from `after` on if it is given; without end, or up to the newest one.

    A lost connection is resumed where the stream had come to, with or without an event.
    """
    last, patience = None if after is None else str(after), connection.patience()
    query = dict(query) if follow else {**query, "follow": ["false"]}
    path = f"/v1/events?{urlencode(query, doseq=True)}".rstrip("?")
    while True:
        try:
            async for reached, events in _read_stream(connection, path, last):
                patience = connection.patience()
                for number, event in events:
                    last = number
                    yield event
                last = reached or last
            if not follow:
                return
            raise httpx.RemoteProtocolError("the server ended the stream")
        except (httpx.TransportError, UnavailableError) as error:
            await patience.wait(error)


async def _read_stream(
    connection: Connection, path: str, after: str | None
) -> AsyncGenerator[tuple[str | None, list[tuple[str, Event]]]]:
    """Yield, for each piece that arrives, the last id that the stream has named and the events in it, with their ids.

    A piece may hold no event: a comment, which shows that the server is there, or the id that the stream starts at.
    """
    headers = {"accept": "text/event-stream"} | ({} if after is None else {"last-event-id": after})
    async with connection.stream(path, headers, seconds=SILENCE_SECONDS) as response:
        if not response.is_success:
            await response.aread()
            raise error_from(response)
        parser = SSEParser()
        async for chunk in response.aiter_bytes():
            events = [(item.id, parse(Event, item.data.encode())) for item in parser.feed(chunk)]
            yield parser.last_id or None, events


_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    event: str
    data: str
    id: str
    """The last one that the stream named, of this event or an earlier one."""


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
        """Add the next chunk and yield the events that it completes."""
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
