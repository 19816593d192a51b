"""A stage: a bounded queue in front of a number of workers.

- At most `workers` rollouts are worked on, and at most `places` wait for a worker.
- A rollout keeps the worker of the previous stage until it has a place here, so a full queue holds up the stages before
  it and drops nothing.
- Places and workers are granted in order of arrival.
- A cancellation at any point gives back everything the rollout held.
- The deadline starts with the work, so time in a queue counts against none.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio

from api_schemas.rollouts import Span, Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import current_activity, waits_for
from rollout_service.base.errors import StageTimeoutError
from rollout_service.episodes import WorkClock
from rollout_service.observability.telemetry.metrics import Metrics

_LOOK = dict.fromkeys(Stage, "the span shows where the time went") | {
    Stage.EVALUATE: "a grader that hangs can be run by hand in `rollout-service env shell FOLDER --stage evaluate`"
}


@dataclass(slots=True)
class Timer:
    """Times one rollout in a stage; becomes its span."""

    stage: Stage
    attempt: int
    queued_seconds: float
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    _started: float = field(default_factory=time.perf_counter)
    sandbox_seconds: float = 0.0
    engine_seconds: float = 0.0
    tool_seconds: float = 0.0
    replay_seconds: float = 0.0
    turns_replayed: int = 0
    error: str | None = None

    @contextmanager
    def sandbox(self) -> Iterator[None]:
        """Count the block's time as spent on sandboxes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.sandbox_seconds += time.perf_counter() - started

    def span(self) -> Span:
        return Span(
            stage=self.stage,
            attempt=self.attempt,
            started_at=self.started_at,
            queued_seconds=self.queued_seconds,
            seconds=time.perf_counter() - self._started,
            sandbox_seconds=self.sandbox_seconds,
            engine_seconds=self.engine_seconds,
            tool_seconds=self.tool_seconds,
            replay_seconds=self.replay_seconds,
            turns_replayed=self.turns_replayed,
            error=self.error,
        )


class Slot:
    """At most one place in a queue and one worker."""

    def __init__(self, place: ResizableSemaphore | None = None) -> None:
        self._place = place
        self._worker: ResizableSemaphore | None = None

    async def take_place(self, places: ResizableSemaphore) -> None:
        """Wait for a place, unless one is held already."""
        if self._place is None:
            await places.acquire()
            self._place = places

    async def take_worker(self, workers: ResizableSemaphore) -> None:
        """Give back the previous worker, wait for one of this stage, then give back the place."""
        self._free_worker()
        await workers.acquire()
        self._worker = workers
        self._free_place()

    def free(self) -> None:
        self._free_worker()
        self._free_place()

    def _free_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.release()

    def _free_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.release()


class StageLimiter:
    def __init__(self, stage: Stage, *, places: int, workers: int, metrics: Metrics) -> None:
        self.stage = stage
        self.places = ResizableSemaphore(places)
        self.workers = ResizableSemaphore(workers)
        self._metrics = metrics
        metrics.watch_stage(stage, {"queue": lambda: self.places.size, "workers": lambda: self.workers.size})

    @property
    def idle(self) -> bool:
        return not (self.places.in_use or self.workers.in_use)

    def resize(self, *, places: int, workers: int) -> None:
        self.places.resize(places)
        self.workers.resize(workers)

    async def enter(self, slot: Slot, *, since: float, then: Callable[[], Awaitable[object]] | None = None) -> float:
        """Queue, leave the previous stage, and get a worker; return the seconds waited since `since`.

        `since` is a reading of `time.perf_counter`; `then`, if given, is awaited once the worker is held.
        """
        if (activity := current_activity()) is not None:
            activity.enter_stage(self.stage)
        with self._metrics.track_waiting(self.stage):
            with waits_for(StepKind.PLACE, self.stage):
                await slot.take_place(self.places)
            with waits_for(StepKind.WORKER, self.stage):
                await slot.take_worker(self.workers)
            if then is not None:
                with waits_for(StepKind.HOST):
                    await then()
        waited = time.perf_counter() - since
        self._metrics.observe_queue_seconds(self.stage, waited)
        return waited

    @asynccontextmanager
    async def deadline(self, seconds: float, clock: WorkClock) -> AsyncIterator[None]:
        """Work under a deadline, which is absolute except that it moves with the clock.

        Raises:
            StageTimeoutError: The deadline has passed.
        """
        activity = current_activity()
        with (
            self._metrics.track_work(self.stage),
            clock.limit(seconds) as scope,
            nullcontext() if activity is None else activity.working(seconds, scope),
        ):
            yield
        if scope.cancelled_caught:
            raise StageTimeoutError(
                f"the {self.stage} stage took longer than its limit of {seconds:g} s",
                hint=f"Raise `limits.{self.stage}_seconds` in the request or the environment; {_LOOK[self.stage]}.",
                retryable=self.stage is Stage.INIT,
            )


class ResizableSemaphore:
    """Permits are granted in order of arrival. Growing admits waiters at once; shrinking takes no permit from a holder:
    permits above the new size disappear as they are released.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = anyio.Semaphore(size, fast_acquire=True)
        self._surplus = 0
        """Permits that disappear when they are released."""

    @property
    def in_use(self) -> int:
        """May be above `size` after it has shrunk."""
        return self.size + self._surplus - self._free.value

    async def acquire(self) -> None:
        await self._free.acquire()

    def acquire_nowait(self) -> None:
        self._free.acquire_nowait()

    async def acquire_all(self) -> int:
        """Acquire as often as possible, at least once; return the number."""
        await self.acquire()
        taken = 1
        with suppress(anyio.WouldBlock):
            while True:
                self.acquire_nowait()
                taken += 1
        return taken

    def release(self) -> None:
        if self._surplus:
            self._surplus -= 1
        else:
            self._free.release()

    def resize(self, size: int) -> None:
        for _ in range(size, self.size):
            try:
                self._free.acquire_nowait()
            except anyio.WouldBlock:
                self._surplus += 1
        for _ in range(self.size, size):
            self.release()
        self.size = size
