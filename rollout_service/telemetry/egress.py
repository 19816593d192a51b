"""What goes out of sandboxes through lists of hosts, kept at hand: metrics are read without waiting for a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from sandboxes import SandboxProvider
from sandboxes.egress.counts import EgressCounts

LOOK_SECONDS = 5.0


class EgressMeter:
    """Reads the counts of a provider now and then."""

    def __init__(self, provider: SandboxProvider, seconds: float = LOOK_SECONDS) -> None:
        self._provider = provider
        self._seconds = seconds
        self.counts = EgressCounts()
        """As they were last read."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read them every few seconds until the block is left."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, name="egress counts")
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        while True:
            self.counts = await self._provider.egress_counts()
            await anyio.sleep(self._seconds)
