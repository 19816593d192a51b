"""Jupyter's messages on two ZeroMQ sockets, read by the event loop while someone waits for them.

jupyter_client's `Session` writes and reads them; its clients parse each several times and have no bounds. The peer is
untrusted. A message for another request is dropped before it is decoded, malformed ones are dropped, and a flood is
read at a bounded rate. Messages are not signed (see `kernel.make_connection_info`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import zmq

if TYPE_CHECKING:
    from jupyter_client.session import Session

DELIM = b"<IDS|MSG>"
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
MESSAGE_LIMIT = 4 * 1024 * 1024
QUEUE_LIMIT = 16
FLOOD_BYTES = 256 * 1024
"""A reader pauses after so many bytes or `FLOOD_MESSAGES`, so a flood takes a small part of a processor."""
FLOOD_MESSAGES = 64
FLOOD_PAUSE = 0.001

Sink = Callable[[str, Mapping[str, Any]], None]
"""Gets the type and the content of each message."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Bound how much any kernel can make the host hold."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
    context.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    context.setsockopt(zmq.LINGER, 0)
    return context


class Wire:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], shell: Path, iopub: Path, session: Session) -> None:
        """Connect without waiting."""
        self._session = session
        self._sockets = [context.socket(zmq.DEALER), context.socket(zmq.SUB)]
        self._sockets[1].setsockopt(zmq.SUBSCRIBE, b"")
        for socket, path in zip(self._sockets, (shell, iopub), strict=True):
            socket.connect(f"ipc://{path}")
        self._streams = [_Stream(socket) for socket in self._sockets]

    def execute(self, code: str, *, silent: bool = False) -> str:
        """Return the id of the message.

        Raises:
            BlockingIOError: The kernel takes no more requests.
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
        # ASCII can encode any Python string, including half of a surrogate pair.
        message["content"] = json.dumps(content).encode()
        frames = self._session.serialize(message)
        try:
            self._sockets[0].send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again as error:
            raise BlockingIOError("the kernel takes no more requests") from error
        return str(message["msg_id"])

    def listen(self, request: str, sink: Sink) -> None:
        def take(frames: Sequence[bytes]) -> None:
            message = decode(self._session, frames, request)
            if message is not None:
                sink(*message)

        for stream in self._streams:
            stream.start(take)

    def stop(self) -> None:
        """Stop reading. Further messages stay in the queue, which is bounded. Idempotent."""
        for stream in self._streams:
            stream.stop()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self.stop()
        for socket in self._sockets:
            socket.close(linger=0)


class _Stream:
    """ZeroMQ's descriptor signals only changes, so each time the socket is read until empty."""

    __slots__ = ("_fd", "_loop", "_resumption", "_sink", "_socket")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._sink: Callable[[Sequence[bytes]], None] | None = None
        self._resumption: asyncio.Handle | None = None

    def start(self, sink: Callable[[Sequence[bytes]], None]) -> None:
        """Begin with messages that have already arrived."""
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
            return  # it pauses
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
    """Return a session without signatures.

    Call this in a thread: the first call imports jupyter_client, which takes too long for the event loop.
    """
    from jupyter_client.session import Session

    session = Session(username="", packer="orjson", unpacker="orjson")
    session.key = b""  # passed to the constructor, it would cause a warning for every kernel
    return session


def decode(session: Session, frames: Sequence[bytes], request: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type and content, or None if the message answers another request or is malformed."""
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
    return value if isinstance(value, Mapping) else {}


def _decode_json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except ValueError:  # numbers and characters that Python's own encoder allows
        return json.loads(data.decode("utf-8", "replace"))
