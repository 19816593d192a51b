"""A handler of the log that never waits for long for whoever reads it.

A reader may stop: a terminal after Ctrl-S, a `tee` that is suspended, a collector that hangs. Lines that it does not
take are dropped, and their number is logged once it reads again.
"""

from __future__ import annotations

import logging
import os
import select

import structlog

log = structlog.get_logger(__name__)

WAIT_MILLISECONDS = 20
"""How long a line may wait for its reader; the event loop stands still meanwhile. Later lines do not wait at all."""


class UnblockedHandler(logging.Handler):
    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._dropped = 0
        self._is_cut = False
        """Whether only the beginning of a line was taken."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_taken = self._write(self.format(record))
        except Exception:  # noqa: BLE001 - as logging's own handlers do
            self.handleError(record)
            return
        if not is_taken:
            self._dropped += 1
        elif self._dropped:
            lines, self._dropped = self._dropped, 0
            log.warning("the log was not read; lines of it are missing", lines=lines)

    def _write(self, line: str) -> bool:
        """Write a line; return whether all of it was taken."""
        wait = 0 if self._dropped else WAIT_MILLISECONDS
        start = "\n" if self._is_cut else ""
        left = f"{start}{line}\n".encode(errors="backslashreplace")
        while left and self._poll.poll(wait):
            # What is ready takes as much as this at once.
            left = left[os.write(self._descriptor, left[: select.PIPE_BUF]) :]
            self._is_cut = True
        self._is_cut = self._is_cut and bool(left)
        return not left
