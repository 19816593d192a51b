"""Admission follows the host's pressure, grants never exceed the ceiling, and no waiter is lost."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.config import GIB, PressureConfig
from sandboxes.scheduling.admission import AdmissionController, Purpose, Ticket
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import (
    FIRST_PER_CPU,
    FLOOR_PER_CPU,
    PATIENCE,
    DiskSpace,
    HostMetrics,
    PressureController,
    Resource,
    measure_pressure,
    memory_reserve,
)

CONFIG = PressureConfig()
CALM = HostMetrics(
    cpus=2,
    load=0.5,
    cpu_stall=5.0,
    memory_stall=0.0,
    io_stall=0.0,
    memory_available=16 * GIB,
    memory_total=32 * GIB,
    disks=(DiskSpace("/run", 100 * GIB, 200 * GIB),),
    descriptors_free=20_000,
    processes_free=30_000,
)
BUSY = HostMetrics(cpus=2, cpu_stall=99.0)
FULL = HostMetrics(cpus=2, memory_available=1 * GIB, memory_total=32 * GIB)


def percent() -> st.SearchStrategy[float | None]:
    return st.none() | st.floats(0, 100)


def sizes() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, 64 * GIB)


METRICS = st.builds(
    HostMetrics,
    cpus=st.integers(1, 256),
    load=st.none() | st.floats(0, 10_000),
    cpu_stall=percent(),
    memory_stall=percent(),
    io_stall=percent(),
    memory_available=sizes(),
    memory_total=sizes(),
    disks=st.lists(
        st.builds(DiskSpace, st.just("/x"), st.integers(0, 9 * GIB), st.integers(1, 9 * GIB)), max_size=2
    ).map(tuple),
    descriptors_free=st.none() | st.integers(-10, 100_000),
    processes_free=st.none() | st.integers(-10, 100_000),
)


@given(
    steps=st.lists(st.tuples(METRICS, st.integers(0, 100), st.integers(0, 100)), max_size=40),
    ceiling=st.integers(2, 64),
    cpus=st.integers(1, 64),
)
def test_the_target_is_always_between_one_and_the_ceiling(steps, ceiling, cpus):
    controller = PressureController(CONFIG, ceiling, cpus)
    assert 1 <= controller.decision.target <= ceiling
    for metrics, used, waiting in steps:
        before = controller.decision.target
        decision = controller.update(metrics, used=min(used, ceiling), waiting=waiting)
        assert 1 <= decision.target <= ceiling
        if decision.hold_reasons:
            assert decision.target <= before
            assert all(reason.text.startswith(reason.resource) for reason in decision.hold_reasons)


@pytest.mark.slow
@given(st.lists(METRICS, max_size=30), st.integers(2, 300))
def test_after_any_pressure_the_ceiling_is_reached_again(past, ceiling):
    controller = PressureController(CONFIG, ceiling, cpus=2)
    for metrics in past:
        controller.update(metrics, used=controller.decision.target, waiting=0)
    for _ in range(ceiling):
        controller.update(CALM, used=controller.decision.target, waiting=1)
    assert controller.decision.target == ceiling
    assert controller.decision.hold_reasons == ()


def test_the_target_grows_only_while_it_is_used():
    controller = PressureController(CONFIG, 1_000, cpus=2)
    first = controller.decision.target
    assert first == 2 * FIRST_PER_CPU
    assert controller.update(CALM, used=3, waiting=0).target == first
    assert controller.update(CALM, used=first, waiting=0).target > first


def test_a_scarce_resource_throttles_at_once_and_ended_sandboxes_are_not_replaced():
    controller = PressureController(CONFIG, 100, cpus=2)
    decision = controller.update(FULL, used=10, waiting=3)
    assert decision.target == 10
    assert [reason.text for reason in decision.hold_reasons] == ["memory: 1.0 GiB available, 3.2 GiB kept free"]
    assert controller.update(FULL, used=4, waiting=3).target == 4
    assert controller.update(FULL, used=0, waiting=3).target == 1


def test_busy_processors_cut_the_target_step_by_step_to_a_floor():
    controller = PressureController(CONFIG, 100, cpus=2)
    assert controller.update(BUSY, used=16, waiting=0).target == 16
    targets = [controller.update(BUSY, used=controller.decision.target, waiting=9).target for _ in range(50)]
    assert targets[PATIENCE - 2] == 16
    assert targets[PATIENCE - 1] == 12
    assert targets[-1] == 2 * FLOOR_PER_CPU


def test_throttling_lasts_until_well_below_the_threshold():
    controller = PressureController(CONFIG, 100, cpus=2)
    for stall, held in [(94.0, False), (95.0, True), (80.0, True), (75.0, False), (94.0, False)]:
        decision = controller.update(HostMetrics(cpus=2, cpu_stall=stall), used=16, waiting=1)
        assert bool(decision.hold_reasons) is held, stall
    controller.update(BUSY, used=16, waiting=1)
    easing = controller.update(HostMetrics(cpus=2, cpu_stall=80.0), used=16, waiting=1)
    assert easing.hold_reasons[0].text == "cpu: some avg10 80 %, not yet below 76 %"


def test_the_load_counts_only_without_psi():
    loaded = HostMetrics(cpus=2, load=40.0)
    assert [pressure.ratio for pressure in measure_pressure(loaded, CONFIG)] == [2.5]
    told = measure_pressure(HostMetrics(cpus=2, load=40.0, cpu_stall=1.0), CONFIG)
    assert all(pressure.ratio < 1 for pressure in told)


def test_a_switch_turns_it_off():
    controller = PressureController(PressureConfig(enabled=False), 50, cpus=2)
    assert controller.update(FULL, used=1, waiting=1).target == 50


def test_a_tenth_of_the_memory_is_kept_and_at_most_four_gib():
    assert memory_reserve(10 * GIB) == GIB
    assert memory_reserve(500 * GIB) == memory_reserve(None) == 4 * GIB


def test_this_host_can_be_read_in_milliseconds(tmp_path):
    reader = HostReader([tmp_path / "missing" / "too"])
    metrics = reader.read()
    assert metrics.memory_available is not None
    assert metrics.memory_total is not None
    assert 0 < metrics.memory_available <= metrics.memory_total
    assert metrics.disks[0].free_bytes > 0
    assert metrics.descriptors_free
    assert metrics.processes_free
    began = time.process_time()
    for _ in range(20):
        reader.read()
    assert (time.process_time() - began) / 20 < 0.005  # 0.5 ms on a quiet machine


def test_a_folder_that_was_removed_is_on_the_disk_that_it_was_on(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    reader = HostReader([folder])
    [before] = reader.read().disks
    folder.rmdir()
    [after] = reader.read().disks
    assert (after.path, after.total_bytes) == (before.path, before.total_bytes)


def test_open_files_are_counted(tmp_path):
    reader = HostReader()
    before = reader.read().descriptors_free
    held = [os.open("/", os.O_PATH) for _ in range(50)]
    after = reader.read().descriptors_free
    for fd in held:
        os.close(fd)
    assert before is not None
    assert after is not None
    assert before - after >= 25  # free numbers below are filled first


def host(root: Path, **files: str) -> Path:
    """Make a /proc or /sys/fs/cgroup with these files; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PROC = {
    "meminfo": "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\nHugePages_Total: 0\n",
    "loadavg": "1.50 0.95 2.61 3/900 14505\n",
    "sys__kernel__pid_max": "32768\n",
    "sys__kernel__threads-max": "10000\n",
    "pressure__cpu": "some avg10=12.50 avg60=2.32 avg300=5.86 total=5953727861\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
}


def test_a_group_of_version_2_takes_precedence(tmp_path):
    proc = host(tmp_path / "proc", **PROC, self__cgroup="0::/pod/service\n")
    groups = host(
        tmp_path / "groups",
        **{
            "pod__memory.max": f"{2 * GIB}\n",
            "pod__memory.current": f"{GIB}\n",
            "pod__memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            "pod__service__memory.max": "max\n",
            "pod__service__pids.max": "100\n",
            "pod__service__pids.current": "30\n",
            "pod__service__cpu.pressure": "some avg10=40.00 avg60=0 avg300=0 total=1\n",
        },
    )
    metrics = HostReader(proc=proc, cgroups=groups).read()
    assert (metrics.memory_available, metrics.memory_total) == (GIB + GIB // 2, 2 * GIB)
    assert metrics.processes_free == 70
    assert metrics.cpu_stall == 40.0
    assert metrics.load == 1.5


def test_a_group_of_version_1_has_a_limit_too(tmp_path):
    proc = host(tmp_path / "proc", **PROC, self__cgroup="4:memory:/job\n8:pids:/\n0::/\n")
    groups = host(
        tmp_path / "groups",
        **{
            "memory__job__memory.limit_in_bytes": f"{GIB}\n",
            "memory__job__memory.usage_in_bytes": f"{GIB}\n",
            "memory__job__memory.stat": "cache 4\ntotal_inactive_file 4096\n",
            "memory__memory.limit_in_bytes": "9223372036854771712\n",
            "memory__memory.usage_in_bytes": "4096\n",
        },
    )
    metrics = HostReader(proc=proc, cgroups=groups).read()
    assert (metrics.memory_available, metrics.memory_total) == (4096, GIB)
    assert metrics.processes_free == 9_100


def test_a_host_without_metrics_is_not_throttled(tmp_path):
    metrics = HostReader(proc=tmp_path, cgroups=tmp_path).read()
    assert metrics.memory_available is metrics.cpu_stall is metrics.load is metrics.processes_free is None
    assert PressureController(CONFIG, 10, cpus=1).update(metrics, used=1, waiting=0).hold_reasons == ()


def make_admission(ceiling: int, on_held_back: Callable[[str], None] | None = None) -> AdmissionController:
    controller = PressureController(CONFIG, ceiling, cpus=2)
    return AdmissionController(controller, lambda: CALM, ceiling=ceiling, on_held_back=on_held_back)


async def admitted(it: AdmissionController, purpose: Purpose) -> Ticket:
    with anyio.fail_after(5):
        return await it.admit(purpose)


async def test_the_last_place_is_for_graders():
    seen: list[str] = []
    it = make_admission(3, seen.append)
    agents = [await admitted(it, Purpose.AGENT) for _ in range(2)]
    with anyio.move_on_after(0.01) as scope:
        await it.admit(Purpose.AGENT)
    assert scope.cancelled_caught
    assert seen == ["ceiling"]
    assert it.hold_reasons[0].text == "ceiling: 2 of 3 sandboxes are in use"
    grader = await admitted(it, Purpose.GRADER)
    assert (it.used, it.waiting) == (3, 0)
    for ticket in (grader, *agents, *agents):
        ticket.release()
    assert it.used == 0


async def test_guests_leave_places_to_rollouts_and_never_wait():
    it = make_admission(4)
    guests = [it.admit_guest(9) for _ in range(3)]
    assert guests[2] is None
    assert it.used == 2
    await admitted(it, Purpose.AGENT)
    with anyio.move_on_after(0.01) as scope:
        await it.admit(Purpose.AGENT)
    assert scope.cancelled_caught
    await admitted(it, Purpose.GRADER)
    guests[0].release()
    assert it.admit_guest(1) is None
    it.observe(BUSY)
    assert it.admit_guest(2) is None
    it.observe(CALM)
    assert it.admit_guest(2) is not None


async def test_one_agent_and_one_grader_continue_under_pressure():
    it = make_admission(50)
    it.observe(FULL)
    assert it.target == 1
    await admitted(it, Purpose.AGENT)
    await admitted(it, Purpose.GRADER)
    assert it.hold_reasons[0].resource == "memory"
    with anyio.move_on_after(0.01) as scope:
        await it.admit(Purpose.GRADER)
    assert scope.cancelled_caught


async def test_waiters_are_admitted_when_the_pressure_ends_graders_first():
    it = make_admission(50)
    it.observe(FULL)
    held = [await admitted(it, purpose) for purpose in (Purpose.GRADER, Purpose.AGENT)]
    order: list[Purpose] = []

    async def wait(purpose: Purpose) -> None:
        await it.admit(purpose)
        order.append(purpose)

    async with anyio.create_task_group() as tasks:
        for purpose in (Purpose.AGENT, Purpose.AGENT, Purpose.GRADER):
            tasks.start_soon(wait, purpose)
        await anyio.wait_all_tasks_blocked()
        assert it.waiting == 3
        it.observe(CALM)
    assert order == [Purpose.GRADER, Purpose.AGENT, Purpose.AGENT]
    assert it.used == 3 + len(held)


async def test_warm_sandboxes_give_way_to_pressure_and_to_waiters():
    it = make_admission(50)
    assert it.headroom(10) == 6
    await admitted(it, Purpose.AGENT)
    it.observe(BUSY)
    assert it.headroom(10) == -2
    assert it.headroom(3) == 0


async def test_the_pressure_is_followed_while_it_runs():
    readings = iter([FULL, CALM])
    controller = PressureController(CONFIG, 50, cpus=2)
    it = AdmissionController(controller, lambda: next(readings, CALM), ceiling=50, period=0.001)
    async with it.running():
        with anyio.fail_after(5):
            tickets = [await it.admit(Purpose.AGENT) for _ in range(20)]
    assert len(tickets) == 20
    assert it.host_metrics == CALM


async def test_a_resource_that_gets_short_is_waited_for():
    it = make_admission(50)
    short: list[str] = []

    async def wait(resource: Resource) -> None:
        await it.wait_until_short(resource)
        short.append(resource)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "memory")
        tasks.start_soon(wait, "disk")
        for metrics, found in ((CALM, []), (BUSY, []), (FULL, ["memory"]), (CALM, ["memory"])):
            it.observe(metrics)
            await anyio.wait_all_tasks_blocked()
            assert short == found
        it.observe(FULL)
        await wait("memory")
        tasks.cancel_scope.cancel()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["agent", "grader", "cancel", "release", "calm", "busy", "full"]), st.integers(0, 30)),
    max_size=60,
)


@settings(deadline=None)
@given(ACTIONS, st.integers(2, 12))
async def test_nobody_is_lost_and_the_ceiling_holds(actions, ceiling):
    it = make_admission(ceiling)
    tickets: list[Ticket] = []
    scopes: list[anyio.CancelScope] = []

    async def ask(purpose: Purpose, scope: anyio.CancelScope) -> None:
        with scope:
            tickets.append(await it.admit(purpose))

    async with anyio.create_task_group() as tasks:
        for action, number in actions:
            if action in ("agent", "grader"):
                scopes.append(anyio.CancelScope())
                tasks.start_soon(ask, Purpose(action), scopes[-1])
            elif action == "cancel" and scopes:
                scopes[number % len(scopes)].cancel()
            elif action == "release" and tickets:
                tickets.pop(number % len(tickets)).release()
            elif action in ("calm", "busy", "full"):
                it.observe({"calm": CALM, "busy": BUSY, "full": FULL}[action])
            if number % 2:
                await anyio.lowlevel.checkpoint()
            assert it.used <= ceiling
        for _ in range(len(scopes) + 1):  # waiters are admitted as others leave, whatever the pressure
            await anyio.wait_all_tasks_blocked()
            assert it.used == len(tickets)
            assert not it.waiting or tickets
            while tickets:
                tickets.pop().release()
    assert (it.used, it.waiting) == (len(tickets), 0)


GUESTS = st.lists(st.sampled_from(["agent", "grader", "guest", "release", "calm", "busy", "full"]), max_size=60)


@settings(deadline=None)
@given(GUESTS, st.integers(2, 12), st.integers(0, 12))
async def test_guests_never_take_what_rollouts_need(actions, ceiling, most):
    it = make_admission(ceiling)
    tickets: list[Ticket] = []
    for action in actions:
        if action == "guest":
            may = not it.waiting and not it.pressure_reasons and it.used < it.target
            if (ticket := it.admit_guest(most)) is not None:
                assert may
                tickets.append(ticket)
        elif action in ("agent", "grader"):
            with anyio.move_on_after(0):
                tickets.append(await it.admit(Purpose(action)))
        elif action == "release" and tickets:
            tickets.pop(0).release()
        elif action in ("calm", "busy", "full"):
            it.observe({"calm": CALM, "busy": BUSY, "full": FULL}[action])
        held = Counter(ticket.purpose for ticket in tickets)
        assert held[Purpose.GUEST] <= max(0, min(most, ceiling - 2))
        assert held[Purpose.GUEST] + held[Purpose.AGENT] < ceiling
        assert it.used == len(tickets) <= ceiling
