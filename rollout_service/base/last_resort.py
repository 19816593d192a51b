"""Ends the process if its shutdown takes too long, wherever it hangs.

Guarantees: once ordered, the process ends within the given seconds, even if the event loop is stuck or nobody reads the
log; before that, the log names the parts that are still open. The guard then ends the remaining sandboxes, and the
store hands out the rollouts again at the next start.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import structlog

log = structlog.get_logger(__name__)

LOG_SECONDS = 0.2
"""The time limit for writing the last log line."""


class LastResort:
    """A thread that sleeps until it gets a deadline for the end of the process."""

    def __init__(self, still_open: Callable[[], list[str]]) -> None:
        """`still_open` names the parts that keep the process from ending; the thread calls it."""
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
