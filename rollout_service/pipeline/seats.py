"""A semaphore whose size can be changed while it is used.

Guarantees: seats are given in order of arrival; a larger size lets those in who wait; a smaller one takes no seat from
anybody: those in use above it are not given again when they are freed.
"""

from __future__ import annotations

from typing import Protocol

import anyio


class Seating(Protocol):
    """A semaphore to acquire and release: `Seats`, or a plain one."""

    async def acquire(self) -> None:
        """Wait for a seat."""

    def acquire_nowait(self) -> None:
        """Take a seat; raises WouldBlock."""

    def release(self) -> None:
        """Give a seat back."""


class Seats:
    """So many seats."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = anyio.Semaphore(size)
        self._surplus = 0
        """Seats in use that go when they are freed."""

    @property
    def in_use(self) -> int:
        """How many are taken; more than the size for a while after it has shrunk."""
        return self.size + self._surplus - self._free.value

    async def acquire(self) -> None:
        """Wait for a seat."""
        await self._free.acquire()

    def acquire_nowait(self) -> None:
        """Take a seat; raises WouldBlock."""
        self._free.acquire_nowait()

    def release(self) -> None:
        """Give a seat back."""
        if self._surplus:
            self._surplus -= 1
        else:
            self._free.release()

    def resize(self, size: int) -> None:
        """Change how many there are."""
        for _ in range(size, self.size):
            try:
                self._free.acquire_nowait()
            except anyio.WouldBlock:
                self._surplus += 1
        for _ in range(self.size, size):
            self.release()
        self.size = size
