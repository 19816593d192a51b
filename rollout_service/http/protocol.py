"""HTTP/1.1 for untrusted peers: uvicorn's protocol, with a bound on everything that a peer may do.

Of a request's head, at most `max_head_bytes` and one read are held. Heads have a deadline; so have bodies, in
proportion to their size, and peers that do not read their response. A refused request is answered with a problem if its
response is next in line, and its connection is closed in any case. Requests that the app is working on have no deadline
here: long polls and streams last as long as they need.

uvicorn limits heads only with h11, which takes several times the CPU time of httptools, and bodies not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api_schemas.errors import Problem
from rollout_service.base.errors import (
    HeadTooLargeError,
    MalformedRequestError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from rollout_service.http.connections import ConnectionSlot, EvictionReason
from rollout_service.http.problems import MEDIA_TYPE, to_problem

BODY_BYTES_PER_SECOND = 16 * 1024
"""A body's deadline is a second later for this many bytes received."""
SEPARATORS = len(": \r\n")
MAX_PIPELINED = 64
LINGER_SECONDS = 1.0
"""How long a refused peer may keep sending. The data is discarded; a reset would destroy the response on its way."""
SINGLE_HEADERS = frozenset({b"host", b"authorization", b"content-type", b"content-length", b"origin"})
"""A proxy and this server might pick different ones if they are repeated."""

Observe = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_head_bytes: int = 32 * 1024
    max_headers: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 120.0


class _Part(Enum):
    """The part of a request that the peer is to send next."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        limits: RequestLimits,
        slot: ConnectionSlot,
        observe: Observe,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        self._observe = observe
        self.slot = slot
        self.opened = False
        self._part = _Part.HEAD
        self._timer: asyncio.TimerHandle | None = None
        self._message = 0
        self._timed: tuple[int, _Part] | None = None
        self._part_began = 0.0
        self._write_timer: asyncio.TimerHandle | None = None
        self._unwritten = 0
        self._head_bytes = 0
        self._silent_bytes = 0
        self._body_bytes = 0
        self._refused: RequestError | UnavailableError | None = None

    # -- the connection --------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened = True
        self.slot.evict = self._evict
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.slot.release()
        self._stop_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._unset_keepalive_if_required()
        if self._part is _Part.NOTHING and not self._is_busy():
            self._part = _Part.HEAD
        self._silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._check_head_size()
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # answered in HTTP/1.1; what follows is not read
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error))
        except RequestError as error:
            self._refuse(error)
        else:
            self._restart_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy() and not self.transport.is_closing():
            self.slot.mark_idle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    # -- parser callbacks ------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise MalformedRequestError(f"more than {MAX_PIPELINED} requests were pipelined on one connection")
        super().on_message_begin()
        self.scope["state"]["slot"] = self.slot
        self._part = _Part.HEAD
        self._message += 1
        self._head_bytes = self._silent_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._silent_bytes = 0  # like `_count_head`, but without a call for every header
        self._head_bytes += len(name) + len(value) + SEPARATORS
        if self._head_bytes > self._limits.max_head_bytes:
            self._check_head_size()
        if self._part is _Part.BODY:
            return  # a trailer, which uvicorn would add to the headers while the app reads them
        super().on_header(name, value)
        if len(self.headers) > self._limits.max_headers:
            raise HeadTooLargeError(f"the request has more than {self._limits.max_headers} headers")

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        _check_framing(self.headers, self.url, self.parser.get_http_version())
        self.slot.mark_busy()
        super().on_headers_complete()
        self._part = _Part.BODY

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        self._part = _Part.NOTHING
        super().on_message_complete()

    def _count_head(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        self._check_head_size()

    def _check_head_size(self) -> None:
        if self._head_bytes + self._silent_bytes > self._limits.max_head_bytes:
            raise HeadTooLargeError(f"the request's head is larger than {self._limits.max_head_bytes} bytes")

    def _answered(self) -> RequestResponseCycle | None:
        """Return the latest request; uvicorn's attribute is None before the first."""
        return self.cycle

    def _is_busy(self) -> bool:
        cycle = self._answered()
        return cycle is not None and not cycle.response_complete

    # -- deadlines -------------------------------------------------------------

    def _restart_timer(self) -> None:
        """Run a single timer, for the part that is awaited now, since it was first awaited."""
        if self._timed == (self._message, self._part):
            return
        self._stop_timer()
        self._timed = (self._message, self._part)
        self._part_began = self.loop.time()
        if self._part is _Part.HEAD:
            self._timer = self.loop.call_later(self._limits.head_seconds, self._head_is_late)
        elif self._part is _Part.BODY:
            self._timer = self.loop.call_later(self._limits.body_seconds, self._body_is_late)

    def _head_is_late(self) -> None:
        self._refuse(RequestTimeoutError(f"the request's head did not arrive within {self._limits.head_seconds:g} s"))

    def _body_is_late(self) -> None:
        allowed = self._limits.body_seconds
        if self._is_busy():
            allowed += self._body_bytes / BODY_BYTES_PER_SECOND
        left = self._part_began + allowed - self.loop.time()
        if self.flow.read_paused:  # the app has not read all that arrived
            left = self._limits.body_seconds
            self._part_began += left
        if left > 0:
            self._timer = self.loop.call_later(left, self._body_is_late)
            return
        self._refuse(RequestTimeoutError(f"the request's body did not arrive within {allowed:.0f} s"))

    def _stop_timer(self) -> None:
        self._timed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writing(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self._write_timer is not None and left == self._unwritten:
            self._observe("write_timeout")
            self.transport.abort()
            return
        self._unwritten = left
        self._write_timer = self.loop.call_later(self._limits.write_seconds, self._watch_writing)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # -- refusals --------------------------------------------------------------

    def _evict(self, reason: EvictionReason) -> None:
        self._refuse(
            UnavailableError("the server is at its limit of connections", hint="Try again later."),
            reason.value,
        )

    def _refuse(self, error: RequestError | UnavailableError, reason: str = "") -> None:
        if self._refused is not None:
            self.transport.abort()
            return
        self._observe(reason or error.code)
        answerable = self._is_answerable()
        self._refused = error
        self._stop_timer()
        if self._is_busy():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not answerable:
            self.transport.close()
            return
        self.transport.write(_answer(to_problem(error)))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _is_answerable(self) -> bool:
        """Return whether this request's response is the next to be written."""
        if self.transport.is_closing() or self.pipeline:
            return False
        cycle = self._answered()
        if cycle is None:
            return True
        if self._part is _Part.HEAD:
            return cycle.response_complete and self._head_bytes + self._silent_bytes > 0
        return not cycle.response_started


def _refusal_of(error: httptools.HttpParserError) -> RequestError:
    """Return what a callback raised inside the parser, or the refusal of a request that the parser rejects."""
    cause = error.__context__
    if isinstance(cause, RequestError):
        return cause
    return MalformedRequestError("the request is not valid HTTP/1.1")


def _check_framing(headers: list[tuple[bytes, bytes]], url: bytes, version: str) -> None:
    """Refuse heads that a proxy and this server might read differently."""
    names = [name for name, _ in headers if name in SINGLE_HEADERS]
    if len(names) > len(set(names)):
        raise MalformedRequestError(f"the header {max(names, key=names.count).decode()} is repeated")
    host = dict(headers).get(b"host")
    if host is None and version == "1.1":
        raise MalformedRequestError("the header Host is missing")
    if not url.startswith(b"/") and httptools.parse_url(url).host is not None:
        authority = url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
        if authority.lower() != (host or b"").strip().lower():
            raise MalformedRequestError("the request's target and its header Host name different hosts")


def _answer(problem: Problem) -> bytes:
    body = problem.model_dump_json().encode()
    lines = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        f"content-type: {MEDIA_TYPE}",
        f"content-length: {len(body)}",
        *(["retry-after: 1"] if problem.retryable else []),
        "connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
