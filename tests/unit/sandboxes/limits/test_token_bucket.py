"""A token bucket lets a burst through at once and then one caller in each interval."""

import time

import anyio
import pytest

from sandboxes.limits.token_bucket import TokenBucket

CAPACITY, INTERVAL = 5, 5.0


class Clock:
    """Time that passes only in `anyio.sleep`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(anyio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_full_bucket_serves_a_burst_at_once(monkeypatch):
    clock = Clock(monkeypatch)
    bucket = TokenBucket(CAPACITY, INTERVAL)
    for _ in range(CAPACITY):
        await bucket.take()
    assert clock.now == 100.0


async def test_an_empty_bucket_serves_one_in_each_interval(monkeypatch):
    clock = Clock(monkeypatch)
    bucket = TokenBucket(CAPACITY, INTERVAL)
    for _ in range(CAPACITY + 4):
        await bucket.take()
    assert clock.now == pytest.approx(100.0 + 4 * INTERVAL)


async def test_an_idle_bucket_fills_up_and_no_further(monkeypatch):
    clock = Clock(monkeypatch)
    bucket = TokenBucket(CAPACITY, INTERVAL)
    for _ in range(CAPACITY + 1):
        await bucket.take()
    clock.now += 2 * CAPACITY * INTERVAL
    begun = clock.now
    for _ in range(CAPACITY):
        await bucket.take()
    assert clock.now == begun
    await bucket.take()
    assert clock.now == pytest.approx(begun + INTERVAL)


async def test_a_cancelled_caller_takes_nothing_from_the_bucket(monkeypatch):
    bucket = TokenBucket(CAPACITY, INTERVAL)
    for _ in range(CAPACITY):
        await bucket.take()
    with anyio.move_on_after(0.01) as scope:
        await bucket.take()
    assert scope.cancelled_caught
    clock = Clock(monkeypatch)
    clock.now = bucket._updated_at + INTERVAL
    await bucket.take()
    assert clock.now == bucket._updated_at
