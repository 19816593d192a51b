"""Bounds how often a session is started anew, so that code that kills its session again and again costs little.

A few starts are free, for the agent that types `exit` or runs out of memory; beyond these a session is started once
in `PERIOD` seconds, and whoever wants it sooner waits. Starting a kernel costs a quarter of a processor second, which
neighbours would feel.
"""

import time

import anyio

FREE = 5
"""Starts that wait for nothing, the first one among them."""
PERIOD = 5.0
"""Seconds in which one more start becomes free."""


class RestartLimiter:
    """The starts of one session."""

    __slots__ = ("_free", "_since")

    def __init__(self) -> None:
        self._free = float(FREE)
        self._since = time.monotonic()

    async def wait(self) -> None:
        """Return when the session may be started, and count that."""
        self._refill()
        if self._free < 1:
            await anyio.sleep((1 - self._free) * PERIOD)
            self._refill()
        self._free = max(0.0, self._free - 1)

    def _refill(self) -> None:
        now = time.monotonic()
        self._free = min(FREE, self._free + (now - self._since) / PERIOD)
        self._since = now
