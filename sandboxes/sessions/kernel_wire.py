"""Jupyter's messages on two ZeroMQ sockets, read by the event loop while someone waits for them.

jupyter_client's `Session` writes them; what it does to read one has no bounds. The peer is untrusted. A message for
another request is dropped before it is decoded, malformed ones are dropped, and `zmtp` bounds the rest. Messages are
not signed (see `kernel.make_connection_info`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sandboxes.sessions.zmtp import ZmtpConnection

if TYPE_CHECKING:
    from jupyter_client.session import Session

DELIM = b"<IDS|MSG>"
HEADERS_LIMIT = 16 * 1024
"""Kernels send some hundred bytes."""
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)

Sink = Callable[[str, Mapping[str, Any]], None]
"""Gets the type and the content of each message."""


class Wire:
    def __init__(self, shell: Path, iopub: Path, session: Session) -> None:
        """Connect without waiting."""
        self._session = session
        self._shell = ZmtpConnection(shell, b"DEALER")
        self._connections = (self._shell, ZmtpConnection(iopub, b"SUB"))

    def execute(self, code: str, *, silent: bool = False, **asked: Any) -> str:
        """Return the id of the message. `kernel_program` reads what else was `asked`.

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
            **asked,
        }
        message = self._session.msg("execute_request")
        # ASCII can encode any Python string, including half of a surrogate pair.
        message["content"] = json.dumps(content).encode()
        frames = self._session.serialize(message)
        try:
            self._shell.send(frames)
        except BlockingIOError as error:
            raise BlockingIOError("the kernel takes no more requests") from error
        return str(message["msg_id"])

    def listen(self, request: str, sink: Sink) -> None:
        def take(frames: Sequence[bytes]) -> None:
            message = decode(frames, request)
            if message is not None:
                sink(*message)

        for connection in self._connections:
            connection.start(take)

    def stop(self) -> None:
        """Stop reading. Further messages stay where they are; their sender has to wait. Idempotent."""
        for connection in self._connections:
            connection.stop()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        for connection in self._connections:
            connection.close()


def make_session() -> Session:
    """Return a session without signatures.

    Call this in a thread: the first call imports jupyter_client, which takes too long for the event loop.
    """
    from jupyter_client.session import Session

    session = Session(username="", packer="orjson", unpacker="orjson")
    session.key = b""  # passed to the constructor, it would cause a warning for every kernel
    return session


def decode(frames: Sequence[bytes], request: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type and content, or None if the message answers another request or is malformed."""
    try:
        begin = frames.index(DELIM) + 2  # after the signature
        header, parent, _, content = frames[begin : begin + 4]
        if request.encode() not in parent or len(header) + len(parent) > HEADERS_LIMIT:
            return None
        if orjson.loads(parent)["msg_id"] != request:
            return None
        return str(orjson.loads(header)["msg_type"]), as_mapping(_decode_json(content))
    except MALFORMED:
        return None


def as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _decode_json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except ValueError:  # numbers and characters that Python's own encoder allows
        return json.loads(data.decode("utf-8", "replace"))
