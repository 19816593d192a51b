"""A minimal HTTP/1.1 client for one engine, kept small because every turn waits for it twice.

httpx's pool takes time that grows with the square of its connections, and aiohttp a fifth of a turn's CPU time.

An answer is complete, of the stated length and within the size limit, or an error. Events are passed on as they arrive,
and none after the call has ended. A connection carries one request at a time, and is reused only after a complete
answer and within `REST_SECONDS`; if a reused one is lost before a byte of the answer came, the request is sent once
more, since the engine may have closed it meanwhile. A cancelled call closes its connection, which the engine sees. A
connection that is established too late is closed, and `close` waits no longer than `CLOSE_SECONDS`.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 1.0
REST_SECONDS = 4.0
"""Less than the 5 seconds after which the engines' HTTP server drops an idle connection."""
FIRST_FINAL_STATUS = 200
_OK = 200
ANSWER_BYTES = 16 << 20


class AnswerTimeoutError(TimeoutError):
    """A request was sent, and no complete answer arrived in time."""


class AnswerTooLargeError(OSError):
    """An answer exceeded its size limit; the rest was not read."""


class HttpClient:
    """The connections to one engine; use it from one event loop, and close it."""

    def __init__(self, url: str) -> None:
        """`url` may have a path that prefixes all others."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._is_tls = parts.scheme == "https"
        self._prefix = parts.path
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nAccept: application/json\r\n"
        self._resting: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._is_closed = False

    async def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        seconds: float | None = None,
        max_bytes: int = ANSWER_BYTES,
        on_event: Callable[[bytes], None] | None = None,
        traceparent: str | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and body of an answer; redirects are not followed.

        With `on_event`, a 200 is read as server-sent events: each one's data is passed on, and the returned body is
        empty. What `on_event` raises ends the exchange, and is raised here.

        Raises:
            AnswerTimeoutError: No complete answer arrived within `seconds`.
            AnswerTooLargeError: The answer, or one of its events, is larger than `max_bytes`.
            OSError: The connection failed or broke, or the answer is not HTTP; both errors above are subclasses.
        """
        length = f"Content-Length: {len(body)}\r\n" if body is not None else ""
        if traceparent is not None:
            length += f"traceparent: {traceparent}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode("ascii")
        request = head + body if body else head
        if (connection := self._rested()) is not None:
            began = self._loop_time()
            try:
                return await self._exchange(connection, request, seconds, max_bytes, on_event)
            except OSError:
                if self._is_closed or not connection.was_lost_silently:
                    raise
            if seconds is not None:
                seconds = max(0.0, seconds - (self._loop_time() - began))
        return await self._exchange(await self._connect(), request, seconds, max_bytes, on_event)

    async def _exchange(
        self,
        connection: "_Connection",
        request: bytes,
        seconds: float | None,
        max_bytes: int,
        on_event: Callable[[bytes], None] | None,
    ) -> tuple[int, bytes]:
        try:
            answer = await connection.exchange(request, seconds, max_bytes, on_event)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._resting.append(connection)
        else:
            connection.close()
        return answer

    async def close(self) -> None:
        self._is_closed = True
        self._resting.clear()
        connections = list(self._open)
        for connection in connections:
            connection.close()
        with anyio.move_on_after(CLOSE_SECONDS):
            for connection in connections:
                await connection.lost.wait()
        self._open.clear()

    def _rested(self) -> "_Connection | None":
        """Return the reusable connection that was used last; close those that have rested too long."""
        oldest = self._loop_time() - REST_SECONDS
        while self._resting and self._resting[0].since < oldest:
            self._resting.popleft().close()
        while self._resting:
            if (connection := self._resting.pop()).is_reusable:
                return connection
        return None

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    async def _connect(self) -> "_Connection":
        context = await anyio.to_thread.run_sync(_tls_context) if self._is_tls else None
        loop = asyncio.get_running_loop()
        port = self._port or (443 if self._is_tls else 80)
        connection = _Connection(loop, self._open)
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                await loop.create_connection(lambda: connection, self._host, port, ssl=context)
        except UnicodeError as error:  # a name that no host can have, such as one with an empty label
            connection.discard()
            raise OSError(f"{self._host!r} is not the name of a host") from error
        except BaseException:
            connection.discard()
            raise
        return connection


@lru_cache(1)
def _tls_context() -> ssl.SSLContext:
    """Make one context for all, because the system's certificates are slow to read."""
    return ssl.create_default_context()


_DATA = b"data:"


class EventSplitter:
    """Passes on the data of each server-sent event once it is whole, in order, however its bytes were cut.

    Names, ids and comments are dropped, and so is an event that is never finished.
    """

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self._on_event = on_event
        self._line = bytearray()
        self._data: list[bytes] = []

    @property
    def unfinished_bytes(self) -> int:
        return len(self._line) + sum(map(len, self._data))

    def feed(self, part: bytes) -> bool:
        """Add bytes, and return whether they completed an event."""
        self._line += part
        if b"\n" not in part:
            return False
        *lines, self._line = self._line.split(b"\n")
        has_completed = False
        for line in lines:
            has_completed |= self._end_line(bytes(line.removesuffix(b"\r")))
        return has_completed

    def _end_line(self, line: bytes) -> bool:
        if line.startswith(_DATA):
            self._data.append(line.removeprefix(_DATA).removeprefix(b" "))
        if line or not self._data:
            return False
        event, self._data = b"\n".join(self._data), []
        self._on_event(event)
        return True


class _Connection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, among: "set[_Connection]") -> None:
        self._loop = loop
        self._among = among
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._room = 0
        """Bytes that the answer with its head, or the present event, may still take."""
        self._max_bytes = 0
        self._events: EventSplitter | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._is_discarded = False
        self.is_reusable = False
        self.since = 0.0
        """When the last answer was complete."""
        self._is_silent = True
        """Whether no byte has come since the last request."""
        self.lost = anyio.Event()

    async def exchange(
        self,
        request: bytes,
        seconds: float | None,
        max_bytes: int,
        on_event: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes]:
        if self._transport is None:
            raise ConnectionError("the connection was never made")
        self._answer, self._room, self._is_silent = self._loop.create_future(), max_bytes, True
        if on_event is not None:
            self._max_bytes, self._events = max_bytes, EventSplitter(on_event)
        self._transport.write(request)
        if seconds is None:
            return await self._answer
        timer = self._loop.call_later(seconds, self._fail, AnswerTimeoutError(f"no answer in {seconds:g} s"))
        try:
            return await self._answer
        finally:
            timer.cancel()

    def close(self) -> None:
        self.is_reusable = False
        self._events = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def was_lost_silently(self) -> bool:
        """Whether the engine closed it, or it broke, before a byte of the answer came."""
        return self.lost.is_set() and self._is_silent

    def discard(self) -> None:
        """Close the connection, now or once it is established.

        An event loop that gives up connecting may close the transport without calling `connection_lost`.
        """
        self._is_discarded = True
        self._among.discard(self)
        self.close()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if self._is_discarded:
            self.close()
        else:
            self._among.add(self)

    def data_received(self, data: bytes) -> None:
        self._is_silent = False
        if self._answer is None:  # nothing was asked
            self.close()
            return
        self._room -= len(data)
        if self._room < 0:
            self._parts.clear()
            self._fail(AnswerTooLargeError("the answer exceeds its size limit"))
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.discard(self)
        self.lost.set()
        why = str(exc) if exc else "the connection was closed before the answer was whole"
        self._fail(exc if isinstance(exc, OSError) else ConnectionError(why))

    def _fail(self, error: Exception) -> None:
        self.is_reusable = False
        self._events = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        self.is_reusable = self._answer is not None

    def on_body(self, part: bytes) -> None:
        if self._events is None or self._parser.get_status_code() != _OK:
            self._parts.append(part)
        else:
            self._pass_on(part, self._events)

    def _pass_on(self, part: bytes, events: EventSplitter) -> None:
        try:
            if events.feed(part):
                self._room = self._max_bytes - events.unfinished_bytes
        except Exception as error:  # noqa: BLE001 - raised again where the answer is awaited
            self._fail(error)

    def on_message_complete(self) -> None:
        parts, self._parts = self._parts, []
        status = self._parser.get_status_code()
        if status < FIRST_FINAL_STATUS or self._answer is None or self._answer.done():
            return
        self._events = None
        self.is_reusable = bool(self._parser.should_keep_alive())
        self.since = self._loop.time()
        self._answer.set_result((status, parts[0] if len(parts) == 1 else b"".join(parts)))
        self._answer = None
