"""A bound on how often something may happen: a burst at once, and one more in each interval after that."""

import time

import anyio


class TokenBucket:
    """For one caller at a time.

    It starts full with `capacity` tokens and regains one every `interval` seconds.
    """

    __slots__ = ("_capacity", "_interval", "_tokens", "_updated_at")

    def __init__(self, capacity: int, interval: float) -> None:
        self._capacity = float(capacity)
        self._interval = interval
        self._tokens = self._capacity
        self._updated_at = time.monotonic()

    async def take(self) -> None:
        """Wait for a token. A caller that is cancelled has acquired none."""
        self._refill()
        if self._tokens < 1:
            await anyio.sleep((1 - self._tokens) * self._interval)
            self._refill()
        self._tokens = max(0.0, self._tokens - 1)

    def _refill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._capacity, self._tokens + (now - self._updated_at) / self._interval)
        self._updated_at = now
