"""What a command prints, in bounded memory: the first and the last bytes are kept, the middle is counted."""

from collections import deque


class OutputBuffer:
    """Keeps at most `limit` bytes (and one read's worth) of a stream, half from its start and half from its end."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "_tail_size", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0
        """Bytes seen, kept or not."""

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
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
        """Whether the stream was longer than the limit."""
        return self.total > self._head_limit + self._tail_limit

    def bytes(self) -> bytes:
        """What is kept, with a note in the place of what was left out."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return bytes(self._head) + tail
        tail = tail[-self._tail_limit :] if self._tail_limit else b""
        left_out = self.total - len(self._head) - len(tail)
        return bytes(self._head) + f"\n[... {left_out} bytes left out ...]\n".encode() + tail

    def text(self) -> str:
        """The same as text; what is no UTF-8 becomes U+FFFD."""
        return self.bytes().decode("utf-8", errors="replace")
