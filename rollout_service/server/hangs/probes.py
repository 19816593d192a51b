"""Whether engines, sandboxes and the store answer, and whether they do anything.

Only what a step has waited for without progress is probed, at most once a second and for `PROBE_SECONDS`. Something is
gone after `FAILURES` in a row. A thread reads the processes of all these sandboxes, at most every `WORK_SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from rollout_service.base.errors import StoreError, describe
from rollout_service.engines.contract import BackendLoad
from rollout_service.engines.errors import BackendRejected
from rollout_service.engines.pool.backend_handle import BackendHandle
from rollout_service.server.hangs.rules import UNSEEN, Signs
from rollout_service.store.contract import Store
from sandboxes import Sandbox
from sandboxes.host.processes import WorkDone, work_of

PROBE_SECONDS = 2.0
FAILURES = 2
WORK_SECONDS = 2.0
PROCESSES = 256
"""The most processes of a sandbox whose work is read."""
IDLE_SHARE = 0.02
"""Below this share of one processor, a sandbox counts as idle: shells and kernels at rest use a little."""
IDLE_BYTES = 256
"""Read and written in a second by an idle sandbox, including probes."""


@dataclass(slots=True)
class _SeenEngine:
    figures: object = None
    changed_at: float = field(default_factory=time.perf_counter)
    """When the figures changed, or it was first seen."""
    load: BackendLoad | None = None
    failures: int = 0
    answers: int = 0
    error: str = ""


class EngineProbes:
    def __init__(self, find: Callable[[str], BackendHandle | None]) -> None:
        self._find = find
        self._seen: dict[str, _SeenEngine] = {}

    async def look(self, backend_ids: Iterable[str]) -> None:
        self._seen = {one: self._seen.get(one) or _SeenEngine() for one in backend_ids}
        async with anyio.create_task_group() as tasks:
            for backend_id, seen in self._seen.items():
                tasks.start_soon(self._look_at, backend_id, seen)

    async def _look_at(self, backend_id: str, seen: _SeenEngine) -> None:
        handle = self._find(backend_id)
        if handle is None:
            seen.failures, seen.error = FAILURES, "it was removed"
            return
        try:
            with anyio.fail_after(PROBE_SECONDS):
                seen.load = await self._ask(handle)
        except Exception as error:  # noqa: BLE001 - a plug-in's defect is its engine's failure alone
            is_late = isinstance(error, TimeoutError)
            seen.error = f"no answer within {PROBE_SECONDS:g} s" if is_late else describe(error).message
            seen.failures += 1
            return
        seen.failures, seen.error = 0, ""
        seen.answers += 1
        report = None if seen.load is None else seen.load.signature
        figures = (report, handle.served, handle.chunks)
        if figures != seen.figures:
            seen.figures, seen.changed_at = figures, time.perf_counter()

    async def _ask(self, handle: BackendHandle) -> BackendLoad | None:
        try:
            return await handle.backend.load()
        except BackendRejected:  # it reports no load
            await handle.backend.health()
            return None

    def signs(self, backend_id: str) -> Signs:
        seen = self._seen.get(backend_id)
        if seen is None:
            return UNSEEN
        if seen.failures:
            return Signs(responds=False if seen.failures >= FAILURES else None)
        still = time.perf_counter() - seen.changed_at if seen.answers and seen.load is not None else None
        is_idle = seen.load is not None and seen.load.running + seen.load.waiting == 0
        return Signs(responds=True if seen.answers else None, still_seconds=still, is_idle=is_idle)

    def note(self, backend_id: str) -> str:
        """Return why it does not answer, or what it reports."""
        seen = self._seen.get(backend_id)
        if seen is None or seen.error or seen.load is None:
            return "" if seen is None else seen.error
        return f"it reports {seen.load.running} running and {seen.load.waiting} waiting"


@dataclass(slots=True)
class _SeenSandbox:
    failures: int = 0
    answers: int = 0
    work: WorkDone | None = None
    read_at: float = 0.0
    worked_at: float = field(default_factory=time.perf_counter)

    def see(self, work: WorkDone, now: float) -> None:
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

    async def look(self, sandboxes: Mapping[str, Sandbox]) -> None:
        self._seen = {one: self._seen.get(one) or _SeenSandbox() for one in sandboxes}
        async with anyio.create_task_group() as tasks:
            for sandbox_id, sandbox in sandboxes.items():
                tasks.start_soon(self._ask, sandbox, self._seen[sandbox_id])
            if sandboxes and time.perf_counter() - self._read_at >= WORK_SECONDS:
                tasks.start_soon(self._read, sandboxes)

    async def _ask(self, sandbox: Sandbox, seen: _SeenSandbox) -> None:
        seen.failures += 1
        with suppress(Exception):  # a plug-in's defect is its sandbox's failure alone
            if await sandbox.responds(PROBE_SECONDS):
                seen.failures = 0
                seen.answers += 1

    async def _read(self, sandboxes: Mapping[str, Sandbox]) -> None:
        pids = {sandbox.pid: one for one, sandbox in sandboxes.items() if sandbox.pid is not None}
        work = await anyio.to_thread.run_sync(lambda: {pid: work_of(pid, PROCESSES) for pid in pids})
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


class StoreProbe:
    """Asks the store something small; such calls cannot be cut short, so at most one is under way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked_at: float | None = None
        self._failed = False

    @property
    def is_idle(self) -> bool:
        return self._asked_at is None

    async def ask(self) -> None:
        self._asked_at = time.perf_counter()
        try:
            await self._store.counts()
            self._failed = False
        except StoreError:
            self._failed = True
        finally:
            self._asked_at = None

    def signs(self) -> Signs:
        """Return whether it answers in time and can be written."""
        waits = self._asked_at is not None and time.perf_counter() - self._asked_at > PROBE_SECONDS
        return Signs(responds=not (waits or self._failed or self._store.problem is not None))

    @property
    def error(self) -> str:
        problem = self._store.problem
        return "" if problem is None else str(problem)
