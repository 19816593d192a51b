"""The connecting side of ZMTP 3.0, ZeroMQ's protocol, on a Unix socket whose other end may be hostile.

Guarantees:
- A message and its frames are bounded together. libzmq bounds each frame but not their number, and holds them all until
  the last has come, so code inside could fill the host's memory.
- Nothing is read while nobody listens. A flood is read at a bounded rate, and takes a quarter of a processor at most,
  with what listens.
- A peer that breaks the protocol or a bound is disconnected for good.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

MESSAGE_LIMIT = 4 * 1024 * 1024
MAX_FRAMES = 64
PENDING_LIMIT = 1024 * 1024
"""Nothing more is sent while so many bytes wait for the peer to read them."""
READ_SIZE = 64 * 1024
FLOOD_BYTES = 256 * 1024
"""A reader pauses after so many bytes or `FLOOD_FRAMES`, and after what took longer than `FLOOD_PAUSE`."""
FLOOD_FRAMES = 512
FLOOD_PAUSE = 0.001
REST = 3
"""How many times as long as the reading a pause is."""

MORE, LONG, COMMAND = 1, 2, 4
GREETING_SIZE = 64
VERSION = 3
MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = (b"\xff" + bytes(8) + b"\x7f" + bytes((VERSION, 0)) + MECHANISM).ljust(GREETING_SIZE, b"\0")
READY = b"\x05READY"
SUBSCRIBE_TO_ALL = b"\x01"


class ZmtpConnection:
    def __init__(self, path: Path, kind: bytes) -> None:
        """Connect without waiting, as a socket of the kind `DEALER` or `SUB`; the latter gets all messages."""
        self._loop = asyncio.get_running_loop()
        self._sink: Callable[[Sequence[bytes]], None] | None = None
        self._resumption: asyncio.Handle | None = None
        self._greeted = self._is_ready = self._ended = False
        self._received, self._frames, self._size = bytearray(), list[bytes](), 0
        self._unsent = bytearray(GREETING + encode_frame(READY + encode_property(b"Socket-Type", kind), COMMAND))
        self._held = bytearray(encode_frame(SUBSCRIBE_TO_ALL) if kind == b"SUB" else b"")
        """Sent once the peer is ready."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with suppress(OSError):  # reading then fails too
            self._socket.connect(str(path))
        self._flush()
        self._resume()

    def send(self, frames: Sequence[bytes]) -> None:
        """
        Raises:
            BlockingIOError: The peer takes no more, or is disconnected.
        """
        if self._ended or len(self._unsent) + len(self._held) > PENDING_LIMIT:
            raise BlockingIOError("the peer takes no more messages")
        waiting = self._unsent if self._is_ready else self._held
        for frame in frames[:-1]:
            waiting += encode_frame(frame, MORE)
        waiting += encode_frame(frames[-1])
        self._flush()

    def start(self, sink: Callable[[Sequence[bytes]], None]) -> None:
        """Begin with messages that have already arrived."""
        self._sink = sink
        if self._resumption is None and not self._ended:
            self._resumption = self._loop.call_soon(self._resume)

    def stop(self) -> None:
        """Leave further messages to the next `start`. Idempotent."""
        self._sink = None
        if self._is_ready and not self._ended:
            self._pause()

    def close(self) -> None:
        """Idempotent."""
        self._sink = None
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._pause()
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._received.clear()
            self._frames.clear()

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        if self._resumption is not None:
            self._resumption.cancel()
            self._resumption = None

    def _resume(self) -> None:
        self._resumption = None
        if not self._ended:
            self._loop.add_reader(self._socket, self._read)
            self._read()

    def _read(self) -> None:
        begun, flooded = time.thread_time(), False
        try:
            flooded = self._read_some()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._end()
        took = time.thread_time() - begun
        if (flooded or took > FLOOD_PAUSE) and not self._ended:
            self._pause()
            self._resumption = self._loop.call_later(max(FLOOD_PAUSE, REST * took), self._resume)

    def _read_some(self) -> bool:
        """Accept frames until nobody listens, or as many as the bounds allow; return whether those ended it.

        Raises:
            BlockingIOError: Nothing more has arrived.
            OSError: The peer has disconnected.
            ValueError: The peer breaks the protocol or a bound.
        """
        size = count = 0
        while size < FLOOD_BYTES and count < FLOOD_FRAMES and not self._ended:
            if self._is_ready and self._sink is None:
                self._pause()
                return False
            if self._take_frame():
                count += 1
                continue
            data = self._socket.recv(READ_SIZE)
            if not data:
                raise ConnectionResetError
            self._received += data
            size += len(data)
        return True

    def _take_frame(self) -> bool:
        """Return False if no whole frame has arrived."""
        data = self._received
        if not self._greeted:
            return self._take_greeting()
        begin = 9 if data[:1] and data[0] & LONG else 2
        if len(data) < begin:
            return False
        flags, size = data[0], int.from_bytes(data[1:begin], "big")
        if self._size + size > MESSAGE_LIMIT or len(self._frames) >= MAX_FRAMES:
            raise ValueError("the message is too large")
        if len(data) < begin + size:
            return False
        body = bytes(data[begin : begin + size])
        del data[: begin + size]
        self._take(flags, body)
        return True

    def _take_greeting(self) -> bool:
        data = self._received
        if len(data) < GREETING_SIZE:
            return False
        if data[0] != GREETING[0] or data[10] < VERSION or data[12:32] != MECHANISM:
            raise ValueError("the peer speaks another protocol")
        del data[:GREETING_SIZE]
        self._greeted = True
        return True

    def _take(self, flags: int, body: bytes) -> None:
        if flags & COMMAND:
            if body.startswith(READY) and not self._is_ready:
                self._is_ready = True
                self._unsent += self._held
                self._held.clear()
                self._flush()
            return
        if not self._is_ready:
            raise ValueError("a message before the handshake")
        self._frames.append(body)
        self._size += len(body)
        if not flags & MORE:
            message, self._frames, self._size = self._frames, [], 0
            if self._sink is not None:
                self._sink(message)

    def _flush(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end()
            return
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)


def encode_frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


def encode_property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
