"""The contract of a place for segment files, which the services of a store share: a folder, or a part of a bucket.

Every method may block, and may fail as its place does: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_service.base.errors import StoreError


@dataclass(frozen=True, slots=True)
class PlaceTexts:
    where: str
    """Its path or its address."""
    subject: str
    """Like `where`, after the kind of place."""
    unused: str
    """How to give another store a place of its own."""
    shared: str
    """How to let all services see the same place."""
    bring_back: str
    """How to mend it if it is not the place that it was."""
    slow: str
    """How to mend it if it does not answer."""


class SegmentFile(Protocol):
    """A file that one service alone writes.

    Raises:
        OSError: The place fails; every method can raise it.
    """

    takes_more: bool
    """Whether another write may follow the first."""

    def append(self, parts: Sequence[bytes], offset: int) -> None:
        """Write all parts, one after the other; return once they are durable."""

    def is_there(self) -> bool:
        """Return whether readers who know its name find what was written."""

    def close(self) -> None: ...


class SegmentFiles(Protocol):
    """
    Raises:
        OSError: The place fails; every method can raise it.
    """

    write_seconds: float
    """How long a service gathers records, from the beginning of one write to that of the next."""
    reads_at_once: int
    """How many threads may read at once."""

    @property
    def texts(self) -> PlaceTexts: ...

    def prepare(self) -> None:
        """Create the place if that is possible and it does not exist."""

    def begin(self, name: str) -> SegmentFile:
        """Begin a segment file, whose records come after `FILE_HEADER`.

        The name must be one that nobody else uses, now or later.
        """

    def store(self, name: str, data: bytes) -> None:
        """Write a whole file, durably."""

    def store_once(self, name: str, data: bytes) -> None:
        """Write a whole file, durably, if nobody has written one of this name.

        Raises:
            FileExistsError: There is such a file.
        """

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes; fewer where the file ends.

        Raises:
            FileNotFoundError: There is no such file.
        """

    def overwrite(self, name: str, offset: int, length: int) -> None:
        """Overwrite bytes of a file with zeros, durably.

        Raises:
            FileNotFoundError: There is no such file.
        """

    def delete(self, *names: str) -> None:
        """Delete files, if they exist, and what was left of unfinished ones of these names."""

    def has(self, name: str) -> bool: ...

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by its name."""

    def ages(self) -> dict[str, float]:
        """Return for how many seconds each file is unchanged, by the place's own clock."""

    def failed(self, error: OSError) -> StoreError:
        """Return the store's error for a failure of the place, with what to do next."""
