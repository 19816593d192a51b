"""Rollouts of an instance share one setup: made once, given to all, closed when it is not needed any more."""

import anyio
import pytest

from rollout_service.pipeline import shared_setup
from rollout_service.pipeline.shared_setup import IDLE_SECONDS, KEPT_BYTES, MAX_KEPT, Setup, SharedSetups
from sandboxes import Snapshot


class FakeSnapshot(Snapshot):
    size_bytes = 1 << 20

    def __init__(self):
        self.closed = False

    async def close(self):
        self.closed = True


class Maker:
    """Makes setups when it is let, and fails as often as it is told to."""

    def __init__(self, failures=0):
        self.made = []
        self.calls = 0
        self.failures = failures
        self.may_end = anyio.Event()

    async def __call__(self):
        self.calls += 1
        await self.may_end.wait()
        if self.calls <= self.failures:
            raise ValueError("no setup")
        self.made.append(FakeSnapshot())
        return Setup(self.made[-1], {"number": [len(self.made)]})


@pytest.fixture
def maker():
    return Maker()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(shared_setup, "LOOK_SECONDS", 0.001)
    return [0.0]


async def used(setups, make, found, key="key"):
    async with setups.use(key, make) as setup:
        assert setup is None or not setup.snapshot.closed
        found.append(setup)


async def test_a_group_makes_one_setup_and_each_gets_its_own_state(maker):
    counts, found = [], []
    setups = SharedSetups(count=counts.append)
    async with setups.running(), anyio.create_task_group() as tasks:
        for _ in range(16):
            tasks.start_soon(used, setups, maker, found)
        await anyio.wait_all_tasks_blocked()
        assert found == []
        maker.may_end.set()
    assert len(maker.made) == 1
    assert [setup.snapshot for setup in found] == maker.made * 16
    assert sorted(counts) == [False] + [True] * 15
    assert maker.made[0].closed


async def test_different_instances_do_not_wait_for_each_other(maker):
    other, found = Maker(), []
    other.may_end.set()
    setups = SharedSetups()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(used, setups, maker, found)
        await used(setups, other, found, key="other")
        assert len(found) == 1
        maker.may_end.set()


async def test_those_that_waited_for_a_failure_prepare_on_their_own():
    maker, found, failed = Maker(failures=1), [], []

    async def try_it():
        try:
            await used(setups, maker, found)
        except ValueError as error:
            failed.append(error)

    setups = SharedSetups()
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(try_it)
        await anyio.wait_all_tasks_blocked()
        maker.may_end.set()
    assert (len(failed), found, maker.calls) == (1, [None] * 3, 1)
    await used(setups, maker, found)  # whoever comes later tries again
    assert found[-1].snapshot is maker.made[0]


async def test_the_next_one_takes_over_from_one_that_is_cancelled(maker):
    found, scope = [], anyio.CancelScope()

    async def first():
        with scope:
            await used(setups, maker, found)

    setups = SharedSetups()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(used, setups, maker, found)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        maker.may_end.set()
    assert (maker.calls, len(maker.made), len(found)) == (2, 1, 1)


async def until_closed(snapshot):
    with anyio.fail_after(5):
        while not snapshot.closed:
            await anyio.sleep(0.001)


async def test_a_setup_that_nobody_uses_is_closed_after_a_while(maker, clock):
    setups, found = SharedSetups(clock=lambda: clock[0]), []
    maker.may_end.set()
    async with setups.running():
        async with setups.use("key", maker):
            clock[0] = 10 * IDLE_SECONDS
            await anyio.sleep(0.02)
            assert not maker.made[0].closed
        clock[0] += IDLE_SECONDS - 1
        await used(setups, maker, found)
        clock[0] += IDLE_SECONDS - 1
        await anyio.sleep(0.02)
        assert not maker.made[0].closed
        clock[0] += 1
        await until_closed(maker.made[0])
        await used(setups, maker, found)
        assert len(maker.made) == 2


async def test_pressure_closes_what_nobody_uses(maker, clock):
    pressure = [False]
    setups = SharedSetups(lambda: pressure[0], clock=lambda: clock[0])
    other = Maker()
    maker.may_end.set()
    other.may_end.set()
    async with setups.running():
        await used(setups, maker, [])
        async with setups.use("used", other):
            pressure[0] = True
            await until_closed(maker.made[0])
            assert not other.made[0].closed


async def test_only_so_many_are_kept(maker, clock):
    setups = SharedSetups(clock=lambda: clock[0])
    maker.may_end.set()
    async with setups.running():
        for number in range(MAX_KEPT + 1):
            clock[0] += 0.001
            await used(setups, maker, [], key=number)
        await until_closed(maker.made[0])
        assert not any(snapshot.closed for snapshot in maker.made[1:])


async def test_only_so_much_is_kept(maker, clock):
    setups = SharedSetups(clock=lambda: clock[0])
    maker.may_end.set()
    async with setups.running():
        for number in range(3):
            clock[0] += 0.001
            async with setups.use(number, maker) as setup:
                setup.snapshot.size_bytes = KEPT_BYTES // 2
        await until_closed(maker.made[0])
        assert not any(snapshot.closed for snapshot in maker.made[1:])


async def test_each_episode_gets_a_copy_of_the_state():
    class Episode:
        def __init__(self):
            self.state = {}

    setup, one, two = Setup(FakeSnapshot(), {"list": [1]}), Episode(), Episode()
    setup.give(one)
    one.state["list"].append(2)
    setup.give(two)
    assert two.state == {"list": [1]}
