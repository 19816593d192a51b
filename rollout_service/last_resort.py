"""Ends the process when its shutdown takes too long, whatever it hangs in.

Guarantees: once told to, the process has ended after so many seconds, also where the event loop stands still or nobody
reads the log; before that the log says what was still open. The guard of the sandboxes then ends what is left of them,
and the store hands the rollouts out again at the next start.
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
"""How long writing the last line may take."""


class LastResort:
    """A thread that sleeps until it is told by when the process must have ended."""

    def __init__(self, still_open: Callable[[], list[str]]) -> None:
        """`still_open` tells what keeps the process from ending; it is called from the thread."""
        self._still_open = still_open
        # Putting into such a queue is safe even within a handler of a signal.
        self._orders: SimpleQueue[tuple[float, int]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="last-resort", daemon=True)
        self._thread.start()

    def end_within(self, seconds: float, exit_code: int) -> None:
        """Have the process end so soon; of several orders the earliest counts."""
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
            hint="what was not finished runs again after the next start",
        )
