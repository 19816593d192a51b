"""The shutdown of a service, as all of its parts see it.

Once it has begun, everyone who waits gets an answer at once, no new work is accepted, and work in progress has
`drain_seconds` to end; a second request to stop ends the drain; whatever is open after the drain is cut off.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import anyio
import structlog

from rollout_service.base.errors import UnavailableError

log = structlog.get_logger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 1
"""The `Retry-After`, in seconds; clients back off further by themselves."""


class ShuttingDownError(UnavailableError):
    """The service is about to end; the request can be repeated after its restart."""

    code = "shutting_down"

    def __init__(self, *, context: dict[str, Any] | None = None) -> None:
        super().__init__(
            "the service is shutting down",
            hint="Repeat the request; the service answers once it has restarted.",
            context=context,
        )


class Shutdown:
    def __init__(self, drain_seconds: float) -> None:
        self.drain_seconds = drain_seconds
        self.reason = ""
        self.failed = False
        self.drained = False
        self.began_at = 0.0
        self._waits: set[anyio.CancelScope] = set()
        self._requests: set[anyio.CancelScope] = set()
        self._drain: anyio.CancelScope | None = None
        self._hurried = False
        self._stop_starting: anyio.CancelScope | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_drained: Callable[[], None] = lambda: None

    @property
    def begun(self) -> bool:
        return bool(self.reason)

    def begin(self, reason: str, *, failed: bool = False) -> None:
        """Begin the shutdown, or end the drain of one that has begun."""
        if failed and not self.failed:
            self.failed = True
            self.on_failure()
        if self.begun:
            self._hurry()
            return
        self.reason, self.began_at = reason, time.monotonic()
        _cancel(self._waits)
        if self._stop_starting is not None:
            self._stop_starting.cancel()

    def _hurry(self) -> None:
        self._hurried = True
        if self._drain is not None:
            self._drain.cancel()

    @contextmanager
    def starting(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Cancel `scope`, which holds all of the service, if the shutdown begins within the block."""
        self._stop_starting = scope
        if self.begun:
            scope.cancel()
        yield
        self._stop_starting = None

    def refuse(self) -> None:
        if self.begun:
            raise ShuttingDownError

    async def until_begun(self, wait: Callable[[], Awaitable[T]]) -> T:
        """
        Raises:
            ShuttingDownError: The shutdown has begun, or begins first.
        """
        self.refuse()
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                return await wait()
            finally:
                self._waits.discard(scope)
        raise ShuttingDownError

    async def wait(self) -> None:
        try:
            await self.until_begun(anyio.sleep_forever)
        except ShuttingDownError:
            return

    async def drain(self, idle: Callable[[], Awaitable[None]]) -> None:
        seconds = 0.0 if self._hurried else self.drain_seconds - self.seconds
        with anyio.move_on_after(seconds) as self._drain:
            await idle()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_at

    @contextmanager
    def request(self) -> Iterator[anyio.CancelScope]:
        """Cut the block off when the drain is over; the scope says whether that happened."""
        with anyio.CancelScope() as scope:
            self._requests.add(scope)
            if self.drained:
                scope.cancel()
            try:
                yield scope
            finally:
                self._requests.discard(scope)

    def end(self) -> None:
        """End the drain, and cut off the open requests. Idempotent."""
        self.drained = True
        self.on_drained()
        _cancel(self._requests)


def _cancel(scopes: set[anyio.CancelScope]) -> None:
    for scope in list(scopes):
        scope.cancel()


LOG_SECONDS = 0.2
"""The time limit for the last log line."""


class LastResort:
    """A thread that ends the process if its shutdown takes too long, even if the event loop is stuck or nobody reads
    the log.

    Before that, the log names the parts that are still open. The guard then ends the remaining sandboxes, and the store
    hands out the rollouts again at the next start.
    """

    def __init__(self, still_open: Callable[[], list[str]]) -> None:
        """`still_open` is called in the thread."""
        self._still_open = still_open
        # Putting into a SimpleQueue is safe even in a signal handler.
        self._orders: SimpleQueue[tuple[float, int]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="last-resort", daemon=True)
        self._thread.start()

    def end_within(self, seconds: float, exit_code: int) -> None:
        """End the process within these seconds; the earliest of several deadlines counts."""
        self._orders.put((time.monotonic() + seconds, exit_code))

    def _run(self) -> None:
        deadline, exit_code = self._orders.get()
        while True:
            try:
                left = deadline - LOG_SECONDS - time.monotonic()
                sooner, exit_code = self._orders.get(timeout=max(0.0, left))
                deadline = min(deadline, sooner)
            except Empty:
                break
        last_words = threading.Thread(target=self._explain, daemon=True)
        last_words.start()
        last_words.join(LOG_SECONDS)
        os._exit(exit_code)

    def _explain(self) -> None:
        log.error(
            "the shutdown took too long; the process ends now",
            still_open=self._still_open(),
            hint="Unfinished rollouts run again after the next start.",
        )
