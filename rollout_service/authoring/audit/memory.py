"""The memory of sandboxes while a block runs: sampled from outside, so it works with every provider."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
import anyio.to_thread
import psutil

from sandboxes.task_groups import open_task_group

SAMPLE_SECONDS = 0.25
LOOK_SECONDS = 0.02  # until there is a sandbox: some trials end before a second sample


@dataclass(slots=True)
class MemoryPeak:
    """The most memory that was seen."""

    bytes: int = 0


@asynccontextmanager
async def memory_peak(launcher: Callable[[], int | None]) -> AsyncIterator[MemoryPeak]:
    """Sample the resident memory of the sandbox whose launcher has this process id; None means that there is none."""
    peak = MemoryPeak()

    async def sample() -> None:
        while True:
            if (pid := launcher()) is None:
                await anyio.sleep(LOOK_SECONDS)
                continue
            peak.bytes = max(peak.bytes, await anyio.to_thread.run_sync(_resident, pid))
            await anyio.sleep(SAMPLE_SECONDS)

    async with open_task_group() as tasks:
        tasks.start_soon(sample)
        yield peak
        tasks.cancel_scope.cancel()


def _resident(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        launcher = psutil.Process(pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total
