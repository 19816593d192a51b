"""Pauses sandboxes whose agents wait for the engine.

A sandbox is paused only while nothing uses it, and any use resumes it (see `Sandbox.pause`); no failure to pause one
reaches its rollout; memory is taken from paused sandboxes one after another, and only while the host has too little.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self

import anyio
import structlog
from anyio.abc import TaskGroup

from rollout_service.observability.telemetry.metrics import Metrics
from sandboxes import Pausing, Sandbox
from sandboxes.errors import SandboxClosedError, SandboxError
from sandboxes.scheduling.admission import AdmissionController

log = structlog.get_logger(__name__)


class Pauser:
    """Pauses sandboxes only within `running`."""

    def __init__(self, seconds: float, admission: AdmissionController, metrics: Metrics) -> None:
        """An agent waits for `seconds` before its sandbox is paused; 0 pauses none."""
        self._seconds = seconds
        self._admission = admission
        self._metrics = metrics
        self._tasks: TaskGroup | None = None
        self._reclaiming = anyio.Lock()
        self._has_failed = False

    @asynccontextmanager
    async def running(self, pausing: Pausing) -> AsyncIterator[Self | None]:
        """Pause sandboxes as far as their provider can; yield None if none is paused."""
        if self._seconds and pausing != "memory":
            hint = "see `pausing` in docs/reference/sandboxes.md for what this lacks"
            log.info("sandboxes are not paused, or keep memory", pausing=pausing, hint=hint)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield self if self._seconds and pausing != "none" else None
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    @contextmanager
    def waiting(self, sandbox: Sandbox | None) -> Iterator[None]:
        """Pause a sandbox once the block has lasted for long, until the sandbox is used, also after the block."""
        if sandbox is None:
            yield
            return
        begun: list[anyio.CancelScope] = []  # few waits are long, and a scope costs as much as the rest
        timer = asyncio.get_running_loop().call_later(self._seconds, self._begin, sandbox, begun)
        try:
            yield
        finally:
            timer.cancel()
            for scope in begun:
                scope.cancel()

    def _begin(self, sandbox: Sandbox, begun: list[anyio.CancelScope]) -> None:
        if self._tasks is not None:
            begun.append(scope := anyio.CancelScope())
            self._tasks.start_soon(self._pause, sandbox, scope, name=f"pause {sandbox.id}")

    async def _pause(self, sandbox: Sandbox, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                if not await sandbox.pause():
                    return
                self._metrics.count_pause("paused")
                async with self._reclaiming:
                    await self._admission.wait_until_short("memory")
                    self._metrics.count_reclaimed(await sandbox.reclaim())
            except SandboxClosedError:
                pass  # the agent's next call reports it
            except Exception as error:  # the rollout does without the pause
                self._metrics.count_pause("failed")
                if not self._has_failed:
                    defect = None if isinstance(error, SandboxError) else error
                    text = "a sandbox could not be paused; more failures are only counted"
                    log.warning(text, sandbox=sandbox.id, why=str(error), exc_info=defect)
                self._has_failed = True
