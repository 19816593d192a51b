"""A session that dies again and again is started at a bounded rate."""

import time

import anyio
import pytest

from sandboxes.sessions.restart_limit import FREE, PERIOD, RestartLimiter

pytestmark = pytest.mark.anyio


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(anyio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_the_first_starts_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    restarts = RestartLimiter()
    for _ in range(FREE):
        await restarts.wait()
    assert clock.now == 100.0


async def test_more_starts_come_one_in_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    restarts = RestartLimiter()
    for _ in range(FREE + 4):
        await restarts.wait()
    assert clock.now == pytest.approx(100.0 + 4 * PERIOD)


async def test_a_session_that_lives_regains_its_free_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    restarts = RestartLimiter()
    for _ in range(FREE + 1):
        await restarts.wait()
    clock.now += 2 * FREE * PERIOD
    begun = clock.now
    for _ in range(FREE):
        await restarts.wait()
    assert clock.now == begun
    await restarts.wait()
    assert clock.now == pytest.approx(begun + PERIOD)


async def test_who_gives_up_waiting_has_used_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = RestartLimiter()
    for _ in range(FREE):
        await restarts.wait()
    with anyio.move_on_after(0.01) as scope:
        await restarts.wait()
    assert scope.cancelled_caught
    clock = Clock(monkeypatch)
    clock.now = restarts._since + PERIOD
    await restarts.wait()
    assert clock.now == restarts._since
