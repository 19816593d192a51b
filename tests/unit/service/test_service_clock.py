"""A service's time goes on evenly whatever is done to its host's clock, and a jump is said once."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from api_schemas.rollouts import RolloutRequest, RolloutState
from rollout_service.server.lifecycle.foundation import ServiceClock
from rollout_service.store.sqlite import SqliteStore


class Host:
    """A host whose clock can be set."""

    def __init__(self) -> None:
        self.wall, self.passed = 1_000_000.0, 50.0

    def pass_time(self, seconds: float) -> None:
        self.wall, self.passed = self.wall + seconds, self.passed + seconds

    def clock(self) -> ServiceClock:
        return ServiceClock(lambda: self.wall, lambda: self.passed)


@pytest.mark.parametrize("jump", [-7_200.0, 7_200.0, -1.5])
def test_a_jump_moves_nothing_and_is_one_line_and_a_warning_until_the_clock_is_right(jump):
    host = Host()
    clock = host.clock()
    host.pass_time(10)
    host.wall += jump
    with capture_logs() as logs:
        for _ in range(3):
            clock.look()
            host.pass_time(1)
    assert clock() == 1_000_013.0
    [line] = logs
    assert (line["event"], line["seconds"]) == ("the clock jumped", jump)
    [warning] = clock.warnings()
    assert ("behind" if jump < 0 else "ahead of") in warning
    host.wall -= jump
    clock.look()
    assert clock.warnings() == []


def test_a_second_jump_is_told_by_its_own_length():
    host = Host()
    clock = host.clock()
    with capture_logs() as logs:
        for jump in (60.0, -7_200.0):
            host.wall += jump
            clock.look()
    assert [line["seconds"] for line in logs] == [60.0, -7_200.0]


def test_small_corrections_are_followed_and_time_never_goes_back():
    host = Host()
    clock = host.clock()
    with capture_logs() as logs:
        host.wall += 0.5
        clock.look()
        assert clock() == host.wall
        before = clock()
        host.wall -= 0.5
        clock.look()
        assert clock() == before
    assert logs == []
    assert clock.warnings() == []


async def test_a_rollout_keeps_its_order_in_time_though_the_clock_jumps(tmp_path):
    host = Host()
    task: dict[str, Any] = {"environment": "calc", "instance": {}}
    request = RolloutRequest.model_validate({"rollout_id": "r", "task": task})
    async with await SqliteStore.open(tmp_path / "store", clock=host.clock()) as store:
        await store.submit(request)
        host.pass_time(3)
        host.wall += 7_200
        [lease] = await store.claim("me", limit=1, lease_seconds=60)
        assert lease.queued_seconds == pytest.approx(3)
    host.wall -= 10_000
    async with await SqliteStore.open(tmp_path / "store", clock=host.clock()) as store:
        await store.cancel("r")
        await store.recover("me again")
        rollout = await store.get("r")
        assert rollout.state is RolloutState.CANCELLED
        assert rollout.finished_at >= rollout.created_at
