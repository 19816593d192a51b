"""Whether sandboxes answer, and whether anything in them works.

Guarantees: only sandboxes that a step has waited for without progress are looked at. Reading the processes happens in a
thread, for all sandboxes at once, every `WORK_SECONDS` at most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from rollout_service.server.hangs.rules import UNSEEN, Signs
from rollout_service.server.hangs.signs.engines import FAILURES, PROBE_SECONDS
from sandboxes import Sandbox
from sandboxes.host.work import WorkDone, work_below

WORK_SECONDS = 2.0
IDLE_SHARE = 0.02
"""The share of one processor below which a sandbox does nothing: shells and kernels at rest use a little."""
IDLE_BYTES = 256
"""The bytes that a sandbox at rest reads and writes in a second; a probe is among them."""


@dataclass(slots=True)
class _SeenSandbox:
    failures: int = 0
    answers: int = 0
    work: WorkDone | None = None
    read_at: float = 0.0
    worked_at: float = field(default_factory=time.perf_counter)

    def see(self, work: WorkDone, now: float) -> None:
        """Note the work that it has done by now."""
        if self.work is not None:
            seconds = now - self.read_at
            cpu = abs(work.cpu_seconds - self.work.cpu_seconds)
            if cpu > IDLE_SHARE * seconds or abs(work.bytes - self.work.bytes) > IDLE_BYTES * seconds:
                self.worked_at = now
        self.work, self.read_at = work, now


class SandboxProbes:
    def __init__(self) -> None:
        self._seen: dict[str, _SeenSandbox] = {}
        self._read_at = 0.0

    def forget(self) -> None:
        self._seen = {}

    async def look(self, sandboxes: Mapping[str, Sandbox]) -> None:
        """Ask these sandboxes whether they answer, read their work, and forget all others."""
        self._seen = {one: self._seen.get(one) or _SeenSandbox() for one in sandboxes}
        async with anyio.create_task_group() as tasks:
            for sandbox_id, sandbox in sandboxes.items():
                tasks.start_soon(self._ask, sandbox, self._seen[sandbox_id])
            if sandboxes and time.perf_counter() - self._read_at >= WORK_SECONDS:
                tasks.start_soon(self._read, sandboxes)

    async def _ask(self, sandbox: Sandbox, seen: _SeenSandbox) -> None:
        if await sandbox.responds(PROBE_SECONDS):
            seen.failures = 0
            seen.answers += 1
        else:
            seen.failures += 1

    async def _read(self, sandboxes: Mapping[str, Sandbox]) -> None:
        pids = {sandbox.pid: one for one, sandbox in sandboxes.items() if sandbox.pid is not None}
        work = await anyio.to_thread.run_sync(work_below, list(pids))
        self._read_at = now = time.perf_counter()
        for pid, sandbox_id in pids.items():
            self._seen[sandbox_id].see(work[pid], now)

    def signs(self, sandbox_id: str) -> Signs:
        seen = self._seen.get(sandbox_id)
        if seen is None:
            return UNSEEN
        responds = False if seen.failures >= FAILURES else True if seen.answers else None
        still = None if seen.work is None else time.perf_counter() - seen.worked_at
        return Signs(responds=responds, still_seconds=still)

    def cpu_seconds(self, sandbox_id: str) -> float | None:
        """Return the processor time of a sandbox, if it was read."""
        seen = self._seen.get(sandbox_id)
        return None if seen is None or seen.work is None else seen.work.cpu_seconds
