"""Jupyter's messages on two ZeroMQ sockets, read by the event loop while somebody waits for them.

Messages are written and read by jupyter_client's `Session`; its clients are left out, since they take each message
apart several times and have no bounds. The peer is hostile: a message that answers another request is dropped before
it is decoded, one that is not well formed is dropped too, and a flood is read at a bounded rate. Messages are not
signed, see `kernel.make_connection_info`.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq
from jupyter_client.session import DELIM, Session

MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What `Session` raises where a message is not what it should be."""
MESSAGE_LIMIT = 4 * 1024 * 1024
QUEUE_LIMIT = 16
FLOOD_BYTES = 256 * 1024
"""After so many bytes, or `FLOOD_MESSAGES`, a reader rests; so a flood costs a small part of a processor."""
FLOOD_MESSAGES = 64
FLOOD_PAUSE = 0.001

Sink = Callable[[str, Mapping[str, Any]], None]
"""Gets the type and the content of each message that answers the request."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The one ZeroMQ context of a provider, with bounds on what any kernel may make the host hold."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
    context.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    context.setsockopt(zmq.LINGER, 0)
    return context


class Wire:
    """A kernel's request and output sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], shell: Path, iopub: Path) -> None:
        """Connect to the Unix sockets of the two channels; it waits for nothing."""
        self._session = make_session()
        self._sockets = [context.socket(zmq.DEALER), context.socket(zmq.SUB)]
        self._sockets[1].setsockopt(zmq.SUBSCRIBE, b"")
        for socket, path in zip(self._sockets, (shell, iopub), strict=True):
            socket.connect(f"ipc://{path}")
        self._streams = [_Stream(socket) for socket in self._sockets]

    def execute(self, code: str, *, silent: bool = False) -> str:
        """Send a cell; the id of its message.

        Raises:
            BlockingIOError: the kernel takes no more requests.
        """
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        message = self._session.msg("execute_request")
        # ASCII holds all that a string of Python can, half of a surrogate pair too.
        message["content"] = json.dumps(content).encode()
        frames = self._session.serialize(message)
        try:
            self._sockets[0].send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again as error:
            raise BlockingIOError("the kernel takes no more requests") from error
        return str(message["msg_id"])

    def listen(self, request: str, sink: Sink) -> None:
        """Hand on what answers a request, until `rest`."""

        def take(frames: Sequence[bytes]) -> None:
            message = decode(self._session, frames, request)
            if message is not None:
                sink(*message)

        for stream in self._streams:
            stream.start(take)

    def stop(self) -> None:
        """Stop reading; what comes is left in the queue, which is bounded. Idempotent."""
        for stream in self._streams:
            stream.stop()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self.stop()
        for socket in self._sockets:
            socket.close(linger=0)


class _Stream:
    """Reads one socket. ZeroMQ's descriptor tells of changes only, so each time it is read until it has no more."""

    __slots__ = ("_fd", "_loop", "_resumption", "_sink", "_socket")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._sink: Callable[[Sequence[bytes]], None] | None = None
        self._resumption: asyncio.Handle | None = None

    def start(self, sink: Callable[[Sequence[bytes]], None]) -> None:
        """Begin with what has come already."""
        self._sink = sink
        self._loop.add_reader(self._fd, self._ready)
        self._resumption = self._loop.call_soon(self._resume)

    def stop(self) -> None:
        if self._sink is not None:
            self._sink = None
            self._loop.remove_reader(self._fd)
        if self._resumption is not None:
            self._resumption.cancel()
            self._resumption = None

    def _resume(self) -> None:
        self._resumption = None
        self._ready()

    def _ready(self) -> None:
        if self._resumption is not None:
            return  # it rests
        size = 0
        for _ in range(FLOOD_MESSAGES):
            if self._sink is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._sink(frames)
            size += sum(map(len, frames))
            if size > FLOOD_BYTES:
                break
        self._resumption = self._loop.call_later(FLOOD_PAUSE, self._resume)


def make_session() -> Session:
    """Writes and reads messages, without signatures."""
    session = Session(username="", packer="orjson", unpacker="orjson")
    session.key = b""  # given at once, it would be warned of for every kernel
    return session


def decode(session: Session, frames: Sequence[bytes], request: str) -> tuple[str, Mapping[str, Any]] | None:
    """The type and content of a message; None where it answers another request or is not well formed."""
    try:
        parts = list(frames[frames.index(DELIM) + 1 :])
        if request.encode() not in parts[2]:
            return None
        message = session.deserialize(parts, content=False)
        if message["parent_header"].get("msg_id") != request:
            return None
        return str(message["msg_type"]), as_mapping(_decode_json(message["content"]))
    except MALFORMED:
        return None


def as_mapping(value: object) -> Mapping[str, Any]:
    """The value, or an empty as_mapping where it is none."""
    return value if isinstance(value, Mapping) else {}


def _decode_json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except ValueError:  # numbers and characters that Python's own writer lets through
        return json.loads(data.decode("utf-8", "replace"))
