"""A semaphore that can be resized while it is in use.

Guarantees: permits are granted in order of arrival; growing admits waiters at once; shrinking takes no permit from a
holder: permits above the new size disappear as they are released.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import anyio


class SemaphoreLike(Protocol):
    """A semaphore to acquire and release: `ResizableSemaphore` or anyio's own."""

    async def acquire(self) -> None:
        """Wait for a permit."""

    def acquire_nowait(self) -> None:
        """Acquire a permit.

        Raises:
            WouldBlock: No permit is free.
        """

    def release(self) -> None:
        """Return a permit."""


class ResizableSemaphore:
    """A semaphore with a size that can change."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = anyio.Semaphore(size)
        self._surplus = 0
        """Permits in use that disappear when they are released."""

    @property
    def in_use(self) -> int:
        """The number of permits held; above `size` for a while after it has shrunk."""
        return self.size + self._surplus - self._free.value

    async def acquire(self) -> None:
        """Wait for a permit."""
        await self._free.acquire()

    def acquire_nowait(self) -> None:
        """Acquire a permit.

        Raises:
            WouldBlock: No permit is free.
        """
        self._free.acquire_nowait()

    def release(self) -> None:
        """Return a permit."""
        if self._surplus:
            self._surplus -= 1
        else:
            self._free.release()

    def resize(self, size: int) -> None:
        """Change the number of permits."""
        for _ in range(size, self.size):
            try:
                self._free.acquire_nowait()
            except anyio.WouldBlock:
                self._surplus += 1
        for _ in range(self.size, size):
            self.release()
        self.size = size


async def acquire_available(semaphore: SemaphoreLike) -> int:
    """Acquire a semaphore as often as possible, at least once; return how often."""
    await semaphore.acquire()
    taken = 1
    with suppress(anyio.WouldBlock):
        while True:
            semaphore.acquire_nowait()
            taken += 1
    return taken
