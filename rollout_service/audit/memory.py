"""The memory of sandboxes while a block runs: sampled from outside, so it works with every provider."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
import anyio.to_thread
import psutil

from rollout_service.pipeline.sandbox_source import SandboxSource
from sandboxes.task_groups import open_task_group

SAMPLE_SECONDS = 0.25


@dataclass(slots=True)
class MemoryPeak:
    """The most memory that was seen."""

    bytes: int = 0


@asynccontextmanager
async def memory_peak(sandboxes: SandboxSource) -> AsyncIterator[MemoryPeak]:
    """Sample the resident memory of the live sandboxes of a source, all together."""
    peak = MemoryPeak()

    async def sample() -> None:
        while True:
            pids = [info.pid for info in sandboxes.live() if info.pid is not None]
            peak.bytes = max(peak.bytes, await anyio.to_thread.run_sync(_resident, pids))
            await anyio.sleep(SAMPLE_SECONDS)

    async with open_task_group() as tasks:
        tasks.start_soon(sample)
        yield peak
        tasks.cancel_scope.cancel()


def _resident(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            launcher = psutil.Process(pid)
            for process in [launcher, *launcher.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += process.memory_info().rss
    return total
