"""The warm pool keeps its guarantees over a provider whose sandboxes are only names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandboxes import (
    Bind,
    SandboxSpec,
    SandboxStartError,
)
from sandboxes.config import WarmPoolConfig
from sandboxes.scheduling.warm_pool import WarmPool
from tests.support.clocks import ManualClock
from tests.support.named_sandboxes import NamedProvider, NamedSandbox
from tests.support.waiting import until


class Seen:
    """An observer that records events."""

    def __init__(self) -> None:
        self.starts: list[bool] = []
        self.failures = 0

    def acquired(self, *, warm: bool, seconds: float) -> None:
        assert seconds >= 0
        self.starts.append(warm)

    def refill_failed(self) -> None:
        self.failures += 1


SPEC = SandboxSpec(image="base", sessions=frozenset({"bash", "python"}), label="first")


class Bench:
    """A pool over named sandboxes, with a record of its events."""

    def __init__(self, ceiling: int = 10, **config: Any) -> None:
        self.provider, self.seen, self.clock = NamedProvider(), Seen(), ManualClock(100.0)
        self.spare: int | None = None
        self.pool = WarmPool(
            self.provider,
            WarmPoolConfig(**config),
            ceiling=ceiling,
            headroom=lambda alive: ceiling - alive if self.spare is None else self.spare - alive,
            observer=self.seen,
            clock=self.clock,
        )

    async def take(self, spec: SandboxSpec = SPEC) -> NamedSandbox:
        with anyio.fail_after(5):
            sandbox = await self.pool.start(spec)
        assert isinstance(sandbox, NamedSandbox)
        return sandbox

    async def warmed(self, count: int = 1) -> None:
        await until(lambda: self.pool.warm == count and len(self.provider.alive) >= count)


async def test_the_second_start_is_warm_with_its_sessions_open():
    bench = Bench()
    async with bench.pool.running():
        first = await bench.take()
        await bench.warmed()
        second = await bench.take(replace(SPEC, label="second"))
        assert second is not first
        assert second.sessions == {"bash", "python"}
        assert bench.seen.starts == [False, True]
        await bench.warmed()
        labels = {info.id: (info.state, info.label) for info in bench.pool.live()}
        assert labels[first.id] == ("in_use", "first")
        assert labels[second.id] == ("in_use", "second")
        assert ("warm", "") in labels.values()
    assert bench.provider.alive.keys() == {first.id, second.id}


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, image="other"),
        replace(SPEC, sessions=frozenset()),
        replace(SPEC, network="full"),
        replace(SPEC, memory_bytes=5),
        replace(SPEC, env={"A": "1"}),
        replace(SPEC, read_only_binds=[Bind("/a", "/b")]),
        replace(SPEC, workdir="/elsewhere"),
        replace(SPEC, lifetime_seconds=60.0),
    ],
)
async def test_another_kind_is_started_cold(other):
    bench = Bench()
    async with bench.pool.running():
        await bench.take()
        await bench.warmed()
        await bench.take(other)
        assert bench.seen.starts == [False, False]


async def test_equal_specifications_are_of_one_kind_whatever_their_collections():
    bench = Bench()
    async with bench.pool.running():
        spec = SandboxSpec(env={"A": "1", "B": "2"}, read_only_binds=[Bind("/a", "/b")], network=("a", "b"))
        await bench.take(spec)
        await bench.warmed()
        await bench.take(replace(spec, env={"B": "2", "A": "1"}, read_only_binds=(Bind("/a", "/b"),)))
        assert bench.seen.starts == [False, True]


async def test_a_rebuilt_image_is_never_served_stale():
    bench = Bench()
    async with bench.pool.running():
        await bench.take()
        await bench.warmed()
        (old,) = [info.id for info in bench.pool.live() if info.state == "warm"]
        bench.provider.image = "second"
        await bench.take()
        assert bench.seen.starts == [False, False]
        await until(lambda: old not in bench.provider.alive)
        await bench.warmed()
        await bench.take()
        assert bench.seen.starts[-1] is True


async def test_a_warm_sandbox_that_died_is_not_handed_out():
    bench = Bench()
    async with bench.pool.running():
        await bench.take()
        await bench.warmed()
        (warm,) = [info.id for info in bench.pool.live() if info.state == "warm"]
        bench.provider.alive[warm].well = False
        taken = await bench.take()
        assert taken.id != warm
        await until(lambda: warm not in bench.provider.alive)


@pytest.mark.slow
async def test_a_kind_without_demand_is_ended():
    bench = Bench(idle_seconds=60.0)
    async with bench.pool.running():
        taken = await bench.take()
        await bench.warmed()
        bench.clock.now += 61.0
        await until(lambda: bench.pool.warm == 0)
        await until(lambda: bench.provider.alive.keys() == {taken.id})


async def test_the_least_recently_wanted_kind_gives_way():
    bench = Bench(max_kinds=2)
    async with bench.pool.running():
        for image in ("a", "b", "c"):
            await bench.take(SandboxSpec(image=image))
            await until(lambda: bench.pool.warm > 0)
        await until(
            lambda: (
                {bench.provider.alive[i.id].spec.image for i in bench.pool.live() if i.state == "warm"} == {"b", "c"}
            )
        )


async def test_a_cold_start_at_the_ceiling_ends_a_warm_one():
    bench = Bench(ceiling=2)
    async with bench.pool.running():
        first = await bench.take()
        await bench.warmed()
        other = await bench.take(SandboxSpec(image="other"))
        assert bench.provider.most == 2
        assert bench.provider.alive.keys() == {first.id, other.id}
        with pytest.raises(SandboxStartError, match="the ceiling"):
            await bench.take()


async def test_a_start_that_waits_for_a_place_takes_the_one_that_comes_up_warm():
    bench = Bench(ceiling=2)
    async with bench.pool.running():
        await bench.take()
        bench.provider.hold()
        await until(lambda: bench.pool._starting == 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.take)
            await anyio.wait_all_tasks_blocked()
            bench.provider.go()
        assert bench.seen.starts == [False, True]
        assert bench.provider.most == 2


async def test_nothing_is_started_ahead_without_headroom():
    bench = Bench()
    bench.spare = 1
    async with bench.pool.running():
        await bench.take()
        await anyio.wait_all_tasks_blocked()
        assert bench.provider.started == 1
        bench.spare = None
        bench.pool._notify()
        await bench.warmed()
        bench.spare = 0
        bench.pool._notify()
        await until(lambda: bench.pool.warm == 0)


async def test_nothing_is_started_ahead_while_a_cold_start_is_under_way():
    bench = Bench()
    bench.provider.hold()
    async with bench.pool.running(), anyio.create_task_group() as tasks:
        tasks.start_soon(bench.take)
        await anyio.wait_all_tasks_blocked()
        assert bench.pool._starting == 1
        bench.provider.go()
        await bench.warmed()


async def test_failures_ahead_are_counted_and_tried_again_later():
    bench = Bench()
    async with bench.pool.running():
        bench.provider.broken_python = True
        await bench.take()
        await until(lambda: bench.seen.failures == 1)
        await anyio.wait_all_tasks_blocked()
        assert bench.seen.failures == 1
        assert len(bench.provider.alive) == 1  # the one without a kernel was closed
        bench.provider.broken_python = False
        bench.clock.now += 1.0
        bench.pool._notify()
        await bench.warmed()


async def test_an_image_that_fails_for_days_is_tried_once_a_minute():
    bench = Bench()
    await bench.pool._record_demand(SPEC)
    [(kind, demand)] = bench.pool._demands.items()
    for _ in range(2000):
        bench.pool._record_failure(kind, SandboxStartError("broken"))
    assert demand.retry_at - bench.clock.now == 60.0


async def test_a_cancelled_start_takes_nothing():
    bench = Bench()
    async with bench.pool.running():
        await bench.take()
        await bench.warmed()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await bench.pool.start(SPEC)
        assert scope.cancelled_caught
        assert (bench.pool.warm, len(bench.provider.alive)) == (1, 2)


async def test_without_a_size_nothing_is_kept():
    bench = Bench(size=0)
    async with bench.pool.running():
        await bench.take()
        await anyio.wait_all_tasks_blocked()
        assert (bench.pool.warm, bench.provider.started) == (0, 1)


async def test_closing_the_pool_closes_everything():
    bench = Bench()
    async with bench.pool.running():
        await bench.take()
        await bench.warmed()
    await bench.pool.close()
    await bench.pool.close()
    assert bench.provider.alive == {}


@pytest.mark.slow
async def test_a_killed_kernel_makes_a_sandbox_unhealthy(provider):
    sandbox = await provider.start(SandboxSpec())
    kernel = await sandbox.python()
    assert sandbox.healthy
    pid = (await kernel.execute("import os; os.getpid()")).result
    await sandbox.exec(["bash", "-c", f"kill -9 {pid}"])
    await until(lambda: not sandbox.healthy, 10)
    await sandbox.close()


class PoolMachine(RuleBasedStateMachine):
    """Starts, closes, deaths, pressure, rebuilt images and cancellations in any order."""

    CEILING = 5

    def __init__(self) -> None:
        super().__init__()
        self._contexts = self._open()
        self.portal, self.bench = next(self._contexts)
        self.taken: list[NamedSandbox] = []
        self.given: set[str] = set()

    def _open(self) -> Iterator[tuple[BlockingPortal, Bench]]:
        with start_blocking_portal("asyncio") as portal:
            bench = portal.call(lambda: Bench(self.CEILING, size=2, max_kinds=2, idle_seconds=50.0))
            with self._running(portal, bench):
                yield portal, bench
            assert set(bench.provider.alive) == {it.id for it in self.taken}

    @contextmanager
    def _running(self, portal: BlockingPortal, bench: Bench) -> Iterator[None]:
        with portal.wrap_async_context_manager(bench.pool.running()):
            yield

    def teardown(self) -> None:
        next(self._contexts, None)

    def settle(self) -> None:
        """Let the pool finish its work."""
        self.portal.call(self.bench.pool._notify)
        self.portal.call(anyio.wait_all_tasks_blocked)

    @precondition(lambda self: len(self.taken) < self.CEILING)
    @rule(image=st.sampled_from(["a", "b", "c"]))
    def start(self, image: str) -> None:
        sandbox = self.portal.call(self.bench.take, SandboxSpec(image=image, sessions=frozenset({"bash"})))
        assert sandbox.id not in self.given, "handed out twice"
        assert sandbox.healthy
        assert sandbox.spec.image == image
        self.given.add(sandbox.id)
        self.taken.append(sandbox)

    @precondition(lambda self: len(self.taken) < self.CEILING)
    @rule(image=st.sampled_from(["a", "b"]))
    def start_and_cancel(self, image: str) -> None:
        async def cancelled() -> None:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await self.bench.pool.start(SandboxSpec(image=image))

        self.portal.call(cancelled)

    @precondition(lambda self: self.taken)
    @rule(number=st.integers(0, 9))
    def close(self, number: int) -> None:
        self.portal.call(self.taken.pop(number % len(self.taken)).close)

    @rule(number=st.integers(0, 9))
    def one_dies(self, number: int) -> None:
        warm = [info.id for info in self.bench.pool.live() if info.state == "warm"]
        if warm:
            self.bench.provider.alive[warm[number % len(warm)]].well = False

    @rule()
    def image_rebuilt(self) -> None:
        self.bench.provider.image += "+"

    @rule(spare=st.none() | st.integers(0, 5))
    def pressure(self, spare: int | None) -> None:
        self.bench.spare = spare

    @rule(seconds=st.floats(0.0, 60.0))
    def time_passes(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.settle()

    @rule(count=st.integers(1, 3))
    def starts_ahead_fail(self, count: int) -> None:
        self.bench.provider.failures = count
        self.settle()
        self.bench.provider.failures = 0

    @invariant()
    def never_above_the_ceiling(self) -> None:
        assert self.bench.provider.most <= self.CEILING

    @invariant()
    def nothing_leaks(self) -> None:
        async def settled() -> dict[str, str]:
            self.bench.pool._notify()
            await anyio.wait_all_tasks_blocked()
            while self.bench.pool._refills:  # its task looks blocked until the loop passes on what it waits for
                await anyio.lowlevel.checkpoint()
            # In the same step of the loop: the pool also starts sandboxes by the clock.
            return {info.id: info.state for info in self.bench.pool.live()}

        live = self.portal.call(settled)
        assert {name for name, state in live.items() if state == "in_use"} == {it.id for it in self.taken}


PoolMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestPool = pytest.mark.slow(PoolMachine.TestCase)
