"""Engines that keep a request of a live session waiting for a bounded time.

Guarantee: a request that makes no progress because its pool is paused, or has no engine in service, for longer than
allowed is aborted and fails with `PoolHeldError`, so that nothing of it is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from rollout_service.engines.contract import GenerateRequest, Generation, TokenChunk, TokenSink
from rollout_service.engines.errors import NoBackendError, PoolPaused
from rollout_service.gateway.sessions.sampling import StreamingGenerator
from rollout_service.live.errors import PoolHeldError
from rollout_service.live.metrics import LiveMetrics


class PausablePool(StreamingGenerator, Protocol):
    """A pool that can be paused; `engines.pool.BackendPool` is one."""

    @property
    def paused(self) -> bool:
        """Whether requests are being held."""

    @property
    def in_service(self) -> bool:
        """Whether an engine serves, or will once a pause ends."""


@dataclass(slots=True)
class _Wait:
    """How long one request has waited since its last progress."""

    since: float | None = None
    held: float = 0.0
    refused: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def begin(self) -> float:
        """Return since when the request waits, from now on if it did not before."""
        if self.since is None:
            self.since = time.monotonic()
        return self.since

    def is_waiting(self) -> bool:
        """Whether no token has come since the wait began."""
        return self.since is not None

    def end(self) -> None:
        if self.since is not None:
            self.held += time.monotonic() - self.since
        self.since = None


@dataclass(frozen=True, slots=True)
class HeldPool:
    """A pool whose pauses its clients do not wait for without end; implements `StreamingGenerator`."""

    name: str
    pool: PausablePool
    changed: Callable[[], anyio.Event]
    """Returns the event of the next change of any pool."""
    seconds: float
    """How long a request waits."""
    metrics: LiveMetrics

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Sample a continuation.

        Raises:
            PoolHeldError: The pool was paused, or had no engine, for too long.
            InferenceError: No engine answered.
        """
        wait = _Wait()

        def note(chunk: TokenChunk) -> None:
            wait.end()
            if on_tokens is not None:
                on_tokens(chunk)

        generation: Generation | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, wait)
            with wait.scope:
                try:
                    generation = await self.pool.generate(request, affinity=affinity, on_tokens=note)
                except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
                    failure = error
            tasks.cancel_scope.cancel()
        wait.end()
        self._count(wait)
        if wait.refused or isinstance(failure, NoBackendError | PoolPaused):
            raise self._error() from failure
        if failure is not None:
            raise failure
        assert generation is not None  # noqa: S101 - neither refused nor failed
        return generation

    def release(self, affinity: str) -> None:
        """Free the place of a session that has ended."""
        self.pool.release(affinity)

    async def _watch(self, wait: _Wait) -> None:
        """Cancel a request that has waited too long in a pause."""
        while True:
            changed = self.changed()
            if self.pool.in_service and not self.pool.paused:
                wait.end()
                await changed.wait()
                continue
            with anyio.move_on_after(wait.begin() + self.seconds - time.monotonic()):
                await changed.wait()
                continue
            if wait.is_waiting():  # otherwise tokens came while the pool began to pause
                wait.refused = True
                wait.scope.cancel()
                return

    def _count(self, wait: _Wait) -> None:
        if wait.held or wait.refused:
            self.metrics.held(self.name, wait.held, refused=wait.refused)

    def _error(self) -> PoolHeldError:
        return PoolHeldError(
            f"the model is being updated, and took no requests for {self.seconds:g} s",
            hint="Repeat the request later; nothing of this one was recorded.",
            seconds=min(self.seconds, 5.0),
        )
