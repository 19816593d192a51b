"""Server-sent events, split as their bytes arrive.

Guarantees: an event is passed on once it is whole, in order, however its bytes were cut; one that is never finished is
never passed on. Only the data of events counts: names, ids and comments are dropped.
"""

from collections.abc import Callable

_DATA = b"data:"


class EventSplitter:
    """Splits one stream, and passes on the data of each event."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self._on_event = on_event
        self._line = bytearray()
        self._data: list[bytes] = []

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the event that is not whole yet."""
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
