"""Keep a command's output in bounded memory: its first and last bytes, and the size of the middle."""

from collections import deque

CONTINUATION, FIRST_BYTE, FIRST_OF_THREE, FIRST_OF_FOUR = 0x80, 0xC0, 0xE0, 0xF0
"""The lowest continuation byte of UTF-8, and the lowest first byte of a character with 2, 3 and 4 bytes."""


class OutputBuffer:
    """Keeps at most `limit` bytes (plus one read) of a stream, half from its start and half from its end."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "_tail_size", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0
        """All bytes seen, including those not kept."""

    def add(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
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
        """Return the bytes kept, with a note in place of those left out."""
        head, tail = bytes(self._head), b"".join(self._tail)
        if not self.truncated:
            return head + tail
        return _join_with_note(head, tail[-self._tail_limit :] if self._tail_limit else b"", self.total)

    def text(self) -> str:
        """Return the same as text. Invalid UTF-8 becomes U+FFFD; a character divided by the cut is left out."""
        if not self.truncated:
            return self.bytes().decode("utf-8", errors="replace")
        tail = b"".join(self._tail)[-self._tail_limit :] if self._tail_limit else b""
        kept = _join_with_note(_drop_partial_end(bytes(self._head)), _drop_partial_start(tail), self.total)
        return kept.decode("utf-8", errors="replace")


def _join_with_note(head: bytes, tail: bytes, total: int) -> bytes:
    """Join both ends of a stream of `total` bytes with a note of how many are missing between them."""
    left_out = total - len(head) - len(tail)
    return head + f"\n[... {left_out} bytes left out ...]\n".encode() + tail


def _drop_partial_end(data: bytes) -> bytes:
    """Drop the beginning of a character that is cut off at the end."""
    for length in range(1, min(len(data), 3) + 1):
        first = data[-length]
        if first >= FIRST_BYTE:
            needed = 4 if first >= FIRST_OF_FOUR else 3 if first >= FIRST_OF_THREE else 2
            return data[:-length] if needed > length else data
        if first < CONTINUATION:
            break
    return data


def _drop_partial_start(data: bytes) -> bytes:
    """Drop the end of a character that is cut off at the start."""
    at = 0
    while at < min(len(data), 3) and CONTINUATION <= data[at] < FIRST_BYTE:
        at += 1
    return data[at:]
