"""The time of a service, which no jump of its host's clock moves.

Guarantees: time never goes back, and a second of it lasts a second, also while the host is suspended. The host's clock
is followed as long as it is set by less than `JUMP_SECONDS` at once. Each jump beyond is one line of the log; while the
two clocks differ, `warnings` says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

log = structlog.get_logger(__name__)

JUMP_SECONDS = 1.0
"""From which difference on the host's clock has jumped; time servers slew smaller ones."""
LOOK_SECONDS = 1.0
HINT = "Set the clock right, for example with a time server, and then restart the service, so that its times are right."


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ServiceClock:
    """Unix time from one reading of the host's clock, counted on by a clock that nobody sets; call it to read it."""

    def __init__(
        self, host: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot
    ) -> None:
        self._host = host
        self._steady = steady
        self._offset = host() - steady()
        self._ahead = 0.0
        """By how many seconds the host's clock was ahead of this one at the last look; negative if it was behind."""

    def __call__(self) -> float:
        """Return the Unix time in seconds."""
        return self._offset + self._steady()

    def look(self) -> None:
        """Follow the host's clock, or note and log that it has jumped."""
        before, difference = self._ahead, self._host() - self()
        self._ahead = difference
        if abs(difference - before) >= JUMP_SECONDS:
            log.warning("the clock jumped", seconds=round(difference - before, 1), hint=HINT)
        if 0 <= difference < JUMP_SECONDS:
            self._offset += difference
            self._ahead = 0.0

    def warnings(self) -> list[str]:
        """Return a sentence while the host's clock differs."""
        if abs(self._ahead) < JUMP_SECONDS:
            return []
        where = "ahead of" if self._ahead > 0 else "behind"
        return [
            f"the clock of this host jumped, and is {abs(self._ahead):.0f} s {where} the service's time. {HINT}"
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at the host's clock until the block is left."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, name="clock watch")
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(LOOK_SECONDS)
            self.look()
