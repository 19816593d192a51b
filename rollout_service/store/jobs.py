"""The thread of a store's database, which does the jobs that wait together as one.

- Jobs are done in the order of their requests.
- Cancelling a caller does not stop its job. A caller that writes waits for it all the same; one that reads does not.
- If the thread itself fails, every caller gets an error, and `failed` raises it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.to_thread
import structlog
from prometheus_client import Histogram

from rollout_service.base.errors import StoreError

log = structlog.get_logger(__name__)

PROBLEM_SECONDS = 3.0
"""The shortest time for which `problem` reports a failure."""
COMMIT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MAX_BATCH = 256
"""The most jobs that are done as one, so that the first does not wait for too many others."""


def commit_histogram() -> Histogram:
    return Histogram(
        "rollout_store_commit_seconds",
        "Time to make the writes that waited together durable",
        buckets=COMMIT_SECONDS,
        registry=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    writes: bool
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class JobResult(Generic[J]):
    job: J
    value: Any = None
    error: BaseException | None = None

    def deliver(self) -> None:
        """Pass the result to the caller, unless it is gone. Call it on the event loop."""
        if self.job.future.done():
            return
        if self.error is not None:
            self.job.future.set_exception(self.error)
        else:
            self.job.future.set_result(self.value)


class JobThread(ABC, Generic[J]):
    """A thread that does jobs from `start` to `close`; create it on the event loop."""

    def __init__(self, name: str, address: str, commit_seconds: Histogram | None = None) -> None:
        """`address` is for the log. Several threads may share `commit_seconds`, and any thread may read it."""
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[J | None] = SimpleQueue()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = False
        self._failure: StoreError | None = None
        self._died = anyio.Event()
        self.commit_seconds = commit_seconds or commit_histogram()
        self.health = StoreHealth(address)

    @property
    def problem(self) -> StoreError | None:
        """Why the database cannot be used at the moment; None if no reason is known."""
        return self._failure or self.health.problem

    @property
    def errors(self) -> int:
        return self.health.errors

    @abstractmethod
    def size_bytes(self) -> int: ...

    async def start(self) -> None:
        """
        Raises:
            StoreError: The database cannot be opened.
        """
        self._thread.start()
        with anyio.CancelScope(shield=True):
            await self._opened

    async def failed(self) -> None:
        """Wait until the thread fails, which only a defect can cause.

        Raises:
            StoreError: The thread has failed.
        """
        await self._died.wait()
        raise self._failure or StoreError("the store failed")

    async def close(self) -> None:
        """Do the remaining jobs, close the database and end the thread; idempotent."""
        self._refuse()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)

    def _refuse(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    async def _submit(self, job: J) -> Any:
        """Return what a job returns, or raise its error, once it is durable."""
        if self._died.is_set():
            raise self._failure or StoreError("the store failed")
        if self._closed:
            raise StoreError("the store is closed", hint="The service is shutting down; try again after its restart.")
        self._jobs.put(job)
        if not job.writes:
            return await job.future
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            # A scope on every job would cost more than most jobs do. The scope of a cancelled caller cancels it again
            # at its next await.
            if anyio.current_effective_deadline() != -math.inf:
                raise
        with anyio.CancelScope(shield=True):
            await asyncio.wait([job.future])
        return job.future.result()

    def _die(self, error: BaseException, batch: Sequence[J] = ()) -> None:
        self._failure = StoreError(
            f"a thread of the store failed: {type(error).__name__}: {error}", hint="Restart the service."
        )
        self._died.set()
        left = list(batch)
        while not self._jobs.empty():
            left += [job for job in [self._jobs.get_nowait()] if job is not None]
        self._jobs.put(None)
        for job in left:
            JobResult(job, error=self._failure).deliver()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, unless that is closed: nobody waits then."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- in the thread -----------------------------------------------------------

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _run_batch(self, batch: list[J]) -> None: ...

    @abstractmethod
    def _disconnect(self) -> None: ...

    def _next_job(self) -> J | None:
        """Wait for a job; None ends the thread."""
        return self._jobs.get()

    def _work(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - it is the caller's of `start`
            self._call(self._opened.set_exception, error)
            return
        self._call(self._opened.set_result, None)
        batch: list[J] = []
        try:
            while batch := self._next_batch():
                self._run_batch(batch)
        except BaseException as error:  # noqa: BLE001 - nobody sees a thread end
            self._call(self._die, error, batch)
        finally:
            self._disconnect()

    def _next_batch(self) -> list[J]:
        """Return at least one job; an empty list ends the thread."""
        batch: list[J] = []
        job = self._next_job()
        while job is not None:
            batch.append(job)
            if len(batch) == MAX_BATCH:
                return batch
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return batch
        if batch:
            self._jobs.put(None)  # the end comes after this batch
        return batch


@dataclass(slots=True)
class StoreHealth:
    """The failures of a database, as they were last seen; used on the event loop alone.

    The log says once that it fails, and once that it works again.
    """

    address: str
    errors: int = 0
    _open: dict[str, StoreError] = field(default_factory=dict)
    _last: StoreError | None = None
    _failed_at: float = 0.0
    _is_reported: bool = False

    @property
    def problem(self) -> StoreError | None:
        """Why the store cannot be used, or None. One success does not end the problem of a disk that is full."""
        if self._open:
            return next(iter(self._open.values()))
        return self._last if time.monotonic() - self._failed_at < PROBLEM_SECONDS else None

    def failed(self, part: str, error: StoreError, *, calls: int = 0) -> None:
        self._open[part] = self._last = error
        self._failed_at = time.monotonic()
        self.errors += calls
        self._report()

    def succeeded(self, part: str) -> None:
        self._open.pop(part, None)
        self._report()

    def _report(self) -> None:
        problem = self.problem
        if problem is not None and not self._is_reported:
            log.error("the store fails", path=self.address, error=str(problem), hint=problem.hint)
        elif problem is None and self._is_reported:
            log.info("the store works again", path=self.address)
        self._is_reported = problem is not None
