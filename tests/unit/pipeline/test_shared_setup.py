"""Rollouts of an instance share one setup: made once, given to all, closed when it is not needed any more."""

import anyio
import pytest

from rollout_service.episodes import WorkClock
from rollout_service.pipeline import shared_setup
from rollout_service.pipeline.shared_setup import IDLE_SECONDS, KEPT_BYTES, MAX_KEPT, Setup, SharedSetups
from sandboxes import SandboxStartError, Snapshot
from tests.support.waiting import until


class FakeSnapshot(Snapshot):
    size_bytes = 1 << 20

    def __init__(self):
        self.closed = False

    async def close(self):
        self.closed = True


class Maker:
    """Makes setups once `may_end` is set; the first `failures` calls fail."""

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


async def test_those_that_waited_for_one_that_is_cancelled_prepare_on_their_own(maker):
    found, scope = [], anyio.CancelScope()

    async def first():
        with scope:
            await used(setups, maker, found)

    setups = SharedSetups()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            tasks.start_soon(used, setups, maker, found)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
    assert (maker.calls, found) == (1, [None] * 2)
    maker.may_end.set()
    await used(setups, maker, found)
    assert found[-1].snapshot is maker.made[0]


async def test_the_wait_for_another_counts_against_no_deadline(maker):
    setups, clock, found = SharedSetups(), WorkClock(), []

    async def second():
        with clock.limit(0.05) as scope:
            async with setups.use("key", maker, clock) as setup:
                found.append(setup)
        found.append(scope.cancelled_caught)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(used, setups, maker, [])
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(second)
        await anyio.sleep(0.2)
        maker.may_end.set()
    assert [setup.snapshot for setup in found[:1]] == maker.made
    assert found[1] is False


async def test_a_setup_from_which_nothing_starts_is_not_used_again(maker, clock):
    setups = SharedSetups(clock=lambda: clock[0])
    maker.may_end.set()
    async with setups.running():
        with pytest.raises(SandboxStartError):
            async with setups.use("key", maker):
                raise SandboxStartError("its folder is gone")
        await used(setups, maker, found := [])
        assert found[0].snapshot is maker.made[1]
        await until_closed(maker.made[0])
        assert not maker.made[1].closed


async def test_a_setup_from_which_one_does_not_start_stays_open_for_those_that_start(maker, clock):
    setups = SharedSetups(clock=lambda: clock[0])
    maker.may_end.set()
    async with setups.running():
        async with setups.use("key", maker) as setup:
            with pytest.raises(SandboxStartError):
                async with setups.use("key", maker):
                    raise SandboxStartError("the host is busy")
            await anyio.sleep(0.02)
            assert not setup.snapshot.closed
        await until_closed(maker.made[0])


async def test_a_setup_that_is_taken_while_others_are_closed_stays_open(maker, clock):
    """Closing takes time, in which a rollout may take a setup that was found unused."""
    setups = SharedSetups(lambda: pressure[0], clock=lambda: clock[0])
    pressure, may_close = [False], anyio.Event()

    async def close_slowly():
        await may_close.wait()

    maker.may_end.set()
    async with setups.running():
        await used(setups, maker, [], key="second")
        await used(setups, maker, [], key="first")
        maker.made[1].close = close_slowly  # the newest is closed first
        pressure[0] = True
        await until(lambda: "first" not in setups._entries)
        pressure[0] = False
        async with setups.use("second", maker) as setup:
            may_close.set()
            await until_closed(maker.made[0])
            assert setup.snapshot is maker.made[2]
            assert not setup.snapshot.closed


async def until_closed(snapshot):
    await until(lambda: snapshot.closed)


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


@pytest.mark.parametrize(
    ("sizes", "closed"),
    [([1] * (MAX_KEPT + 1), 0), ([KEPT_BYTES // 2] * 3, 0), ([1, KEPT_BYTES + 1], 1)],
    ids=["so many", "so much", "one that is too large takes no other along"],
)
async def test_only_so_many_and_so_much_are_kept(maker, clock, sizes, closed):
    setups = SharedSetups(clock=lambda: clock[0])
    maker.may_end.set()
    async with setups.running():
        for number, size in enumerate(sizes):
            clock[0] += 0.001
            async with setups.use(number, maker) as setup:
                setup.snapshot.size_bytes = size
        await until_closed(maker.made.pop(closed))
        assert not any(snapshot.closed for snapshot in maker.made)


async def test_each_episode_gets_a_copy_of_the_state():
    class Episode:
        def __init__(self):
            self.state = {}

    setup, one, two = Setup(FakeSnapshot(), {"list": [1]}), Episode(), Episode()
    setup.give(one)
    one.state["list"].append(2)
    setup.give(two)
    assert two.state == {"list": [1]}
