"""The host's ends of the pipes of one sandboxed process, read by the event loop, and its output in bounded memory.

They are named pipes in a folder that only the host writes to, unlinked as soon as the process has opened them: nothing
else inside can find them. A flood from inside is read at a bounded rate: the buffer bounds the memory; `FLOOD_PAUSE`,
and a longer pause for a long flood, bound the processor time.
"""

import array
import asyncio
import codecs
import errno
import fcntl
import math
import os
import termios
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel

READ_SIZE = 64 * 1024
FLOOD_BYTES = 256 * 1024
"""The reader pauses after so many bytes, so a flood costs the service a small part of a processor."""
FLOOD_PAUSE = 0.004
LEAST_COUNTED = 4096
"""A reading counts as so many bytes at least: a flood of single bytes costs the service as much as one of pages."""
LONG_FLOOD_BYTES = 16 * 1024 * 1024
"""Output beyond this is cut from a result, so there is no hurry to read it."""
LONG_FLOOD_PAUSE = 0.016
FIRST_LOOK = 0.002
"""Seconds before the first reading: a pipe holds 64 KiB, and most programs have ended by then."""
STATUS_LIMIT = 4096

INPUT, OUTPUT, ERROR, STATUS = "in", "out", "err", "st"
NAMES = (INPUT, OUTPUT, ERROR, STATUS)


class Pipes:
    __slots__ = ("_paths", "fds")

    def __init__(self, base: Path) -> None:
        """Make `base`.in, .out, .err and .st, and open the host's ends.

        Raises:
            OSError: The host has no descriptors or no space left.
        """
        self._paths = {name: base.with_name(f"{base.name}.{name}") for name in NAMES}
        self.fds: dict[str, int] = {}
        try:
            for name, path in self._paths.items():
                os.mkfifo(path)
                path.chmod(0o666)  # protected by its folder, which others cannot enter
                # Opened for reading and writing, the input does not wait for a reader.
                flags = os.O_RDWR if name == INPUT else os.O_RDONLY
                self.fds[name] = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            self.unlink()
            self.close()
            raise

    def mark_opened(self) -> None:
        """Unlink the pipes, which the process has opened, and keep the input write-only to see it close."""
        self.unlink()
        both = self.fds.pop(INPUT)
        try:
            self.fds[INPUT] = os.open(f"/proc/self/fd/{both}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: its reader has already gone
                raise
        finally:
            os.close(both)

    def unlink(self) -> None:
        for path in self._paths.values():
            with suppress(FileNotFoundError):
                path.unlink()

    async def write(self, data: bytes, until: float = math.inf) -> bool:
        """Wait for room in the input; return False if its reader has gone, or this end is closed meanwhile.

        Raises:
            TimeoutError: There was not enough room by `until`, on the event loop's clock.
        """
        view = memoryview(data)
        with suppress(BrokenPipeError, anyio.ClosedResourceError):
            while view and (fd := self.fds.get(INPUT)) is not None:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    with anyio.fail_after(until - anyio.current_time()):
                        await anyio.wait_writable(fd)
        return not view

    async def read(self, name: str) -> bytes:
        """Return the next bytes of an output, or b"" at its end or once it is closed here.

        Other tasks get a turn in between, however fast bytes arrive.
        """
        await anyio.lowlevel.checkpoint()
        with suppress(anyio.ClosedResourceError):
            while (fd := self.fds.get(name)) is not None:
                if (data := read_some(fd)) is not None:
                    return data
                await anyio.wait_readable(fd)
        return b""

    def close(self, *names: str) -> None:
        """Close the given ends, or all, also while they are read or written. Idempotent."""
        for name in names or NAMES:
            if (fd := self.fds.pop(name, None)) is not None:
                anyio.notify_closing(fd)  # or a waiting call would go on with whatever has its number next
                os.close(fd)


def count_pending(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def read_some(fd: int, size: int = READ_SIZE) -> bytes | None:
    """Return b"" at the end of the stream, and None if nothing has arrived yet."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # a control shell that was killed before it read its last message
        return b""


class Reader:
    """Passes data from a pipe to `sink`, from the event loop, while it is started.

    It does not wake before `FIRST_LOOK` is over: the output of a short program waits in the pipe, and `stop` takes it.
    """

    __slots__ = ("_fd", "_loop", "_rest_at", "_seen", "_sink", "_timer", "ended")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._sink: Callable[[bytes], object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seen = 0
        self._rest_at = FLOOD_BYTES
        self.ended = False

    def start(self, sink: Callable[[bytes], object]) -> None:
        self._sink, self._seen, self._rest_at = sink, 0, FLOOD_BYTES
        if not self.ended:
            self._timer = self._loop.call_later(FIRST_LOOK, self._resume)

    def stop(self) -> None:
        """Pass on what is in the pipe now; a writer that never pauses cannot prolong it."""
        if self._sink is None:
            return
        self._stop_watching()
        left = count_pending(self._fd)
        while left > 0 and (data := read_some(self._fd, min(left, READ_SIZE))):
            left -= len(data)
            self._sink(data)
        self._sink = None

    def close(self) -> None:
        """Stop at once, and leave data in the pipe. Idempotent, even after the pipe has been closed."""
        if self._sink is not None:
            self._sink = None
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._timer is None:
            self._loop.remove_reader(self._fd)
        else:
            self._timer.cancel()
            self._timer = None

    def _ready(self) -> None:
        data = read_some(self._fd)
        if data is None or self._sink is None:
            return
        if not data:
            self.ended = True
            self._loop.remove_reader(self._fd)
            return
        self._seen += max(len(data), LEAST_COUNTED)
        self._sink(data)
        if self._seen > self._rest_at:
            self._rest_at = self._seen + FLOOD_BYTES
            self._loop.remove_reader(self._fd)
            pause = FLOOD_PAUSE if self._seen < LONG_FLOOD_BYTES else LONG_FLOOD_PAUSE
            self._timer = self._loop.call_later(pause, self._resume)

    def _resume(self) -> None:
        self._timer = None
        if self._sink is not None:
            self._loop.add_reader(self._fd, self._ready)


class StatusLines:
    """A line that is too long, a sign of tampering, ends the stream."""

    __slots__ = ("_buffer", "_fd", "_lines", "_loop", "_on_end", "_waiter", "ended")

    def __init__(self, fd: int, on_end: Callable[[], None] = lambda: None) -> None:
        self._fd = fd
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._lines: list[str] = []
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self._loop.add_reader(fd, self._ready)

    @property
    def waiting(self) -> bool:
        return bool(self._lines)

    def close(self) -> None:
        """Stop reading; a waiting caller gets None."""
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._fd)
            self._on_end()
        self._wake()

    async def next(self, until: float | None = None) -> str | None:
        """Return None at the end of the stream.

        Raises:
            TimeoutError: No line has arrived by `until`, on the event loop's clock, or `expire` was called.
        """
        while not self._lines:
            if self.ended:
                return None
            self._waiter = self._loop.create_future()
            timer = None if until is None else self._loop.call_at(until, self._expire, self._waiter)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return self._lines.pop(0)

    def next_now(self) -> str | None:
        """Return a line that has arrived, without waiting."""
        if not self.ended:
            self._ready()
        return self._lines.pop(0) if self._lines else None

    def expire(self) -> None:
        """Make a waiting caller raise TimeoutError now."""
        if self._waiter is not None:
            self._expire(self._waiter)

    def _expire(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ready(self) -> None:
        data = read_some(self._fd, STATUS_LIMIT)
        if data is None:
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._lines += [line.decode("ascii", errors="replace") for line in lines]
        if not data or len(self._buffer) > STATUS_LIMIT or len(self._lines) > STATUS_LIMIT:
            self.close()
        elif self._lines:
            self._wake()


CONTINUATIONS = bytes(range(0x80, 0xC0))
"""The bytes of a character in UTF-8 after its first."""


class OutputBuffer:
    """Keeps at most `limit` bytes (plus one read), half from the start and half from the end."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "_tail_size", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data[-self._tail_limit :] if self._tail_limit else b"")
        self._tail_size += len(self._tail[-1])
        while self._tail_size - len(self._tail[0]) >= self._tail_limit and len(self._tail) > 1:
            self._tail_size -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        return self.total > self._head_limit + self._tail_limit

    def _end(self) -> bytes:
        return b"".join(self._tail)[-self._tail_limit :] if self._tail_limit else b""

    def bytes(self) -> bytes:
        """Put a note in place of bytes that were left out."""
        return _join(bytes(self._head), self._end(), self.total)

    def text(self) -> str:
        """Replace invalid UTF-8 by U+FFFD; leave out a character that the cut divides."""
        head, tail = bytes(self._head), self._end()
        if self.truncated:
            head, tail = _drop_partial_end(head), tail[:3].lstrip(CONTINUATIONS) + tail[3:]
        return _join(head, tail, self.total).decode("utf-8", errors="replace")


def _join(head: bytes, tail: bytes, total: int) -> bytes:
    left_out = total - len(head) - len(tail)
    return head + (f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b"") + tail


def _drop_partial_end(data: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return data[: len(data) - len(decoder.getstate()[0])]
