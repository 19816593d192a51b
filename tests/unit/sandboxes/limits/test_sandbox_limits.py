"""Control groups, the watchdog and estimates hold a sandbox to its limits, on files that look like the kernel's."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sandboxes.limits.cgroups import SPARE_PROCESSES, ControlGroup, ResourceLimits, find_control_groups
from sandboxes.limits.token_bucket import TokenBucket
from sandboxes.limits.violations import LimitMonitor, LimitViolations
from sandboxes.limits.watchdog import (
    Processes,
    ProcessorYield,
    Watchdog,
    WatchedSandbox,
    exceeds,
    watches_per_sandbox,
)

LIMITS = ResourceLimits(memory_bytes=1 << 30, max_processes=100, cpus=1.5)


def make_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_version_1_groups_are_below_our_own(tmp_path):
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller / "job/7").mkdir(parents=True)
    own = "8:pids:/job/7\n4:memory:/job/7\n1:cpu,cpuacct:/job/7\n0::/\n"
    groups = find_control_groups(tmp_path, own)
    assert groups.enforced == {"memory", "processes", "cpus"}
    assert groups.paths_of("x")["memory"] == tmp_path / "memory/job/7/rollout-x"


def test_version_1_without_rights_enforces_nothing(tmp_path):
    assert find_control_groups(tmp_path, "8:pids:/gone\n4:memory:/gone\n").enforced == frozenset()
    assert find_control_groups(tmp_path, "0::/\n").create("x", LIMITS) is None


@pytest.mark.parametrize(("own_gives", "place"), [("cpu memory pids", "slice/own"), ("", "slice")])
def test_version_2_groups_are_made_where_controllers_are_delegated(tmp_path, own_gives, place):
    make_tree(
        tmp_path,
        {
            "cgroup.controllers": "cpu memory pids",
            "slice/own/cgroup.subtree_control": own_gives,
            "slice/own/cgroup.controllers": "cpu memory pids",
            "slice/cgroup.controllers": "memory pids",
            "slice/cgroup.subtree_control": "memory pids",
        },
    )
    groups = find_control_groups(tmp_path, "0::/slice/own\n")
    assert groups.paths_of("x")["memory"] == tmp_path / place / "rollout-x"
    assert groups.enforced >= {"memory", "processes"}


def test_version_2_without_delegation_enforces_nothing(tmp_path):
    make_tree(tmp_path, {"cgroup.controllers": "hugetlb", "own/cgroup.subtree_control": ""})
    assert find_control_groups(tmp_path, "0::/own\n").enforced == frozenset()


def test_limits_are_written_in_the_form_of_each_version(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    make_tree(new, dict.fromkeys(("memory.max", "memory.swap.max", "pids.max", "cpu.max"), ""))
    make_tree(old, dict.fromkeys(("memory.limit_in_bytes", "pids.max", "cpu.cfs_quota_us"), ""))
    ControlGroup(dict.fromkeys(("memory", "pids", "cpu"), new)).apply(LIMITS)
    ControlGroup(dict.fromkeys(("memory", "pids", "cpu"), old)).apply(LIMITS)
    assert (new / "memory.max").read_text() == f"{1 << 30}\n"
    assert (new / "memory.swap.max").read_text() == "0\n"
    assert (new / "cpu.max").read_text() == "150000 100000\n"
    assert (old / "memory.limit_in_bytes").read_text() == f"{1 << 30}\n"
    assert (old / "cpu.cfs_quota_us").read_text() == "150000\n"
    assert int((new / "pids.max").read_text()) >= 100


def test_a_group_can_yield_the_processor(tmp_path):
    for yields in (True, False):
        ControlGroup({"cpu": tmp_path}).yield_processor(yields)
        assert (tmp_path / "cpu.idle").read_text() == f"{int(yields)}\n"
    ControlGroup({"memory": tmp_path}).yield_processor(True)


def test_the_launchers_tasks_do_not_count(tmp_path):
    make_tree(tmp_path, {"pids.current": "9\n", "pids.max": "max\n"})
    group = ControlGroup({"pids": tmp_path})
    assert group.settle(100) == 8
    assert int((tmp_path / "pids.max").read_text()) == 8 + 100 + SPARE_PROCESSES
    assert ControlGroup({}).settle(100) == 0


def test_linked_version_1_hierarchies_count_as_one(tmp_path):
    (tmp_path / "cpu,cpuacct/job").mkdir(parents=True)
    for name in ("cpu", "cpuacct"):
        (tmp_path / name).symlink_to("cpu,cpuacct")
    groups = find_control_groups(tmp_path, "5:cpu,cpuacct:/job\n")
    assert groups.enforced == {"cpus"}
    group = groups.create("x", ResourceLimits(None, None, None))
    assert group.paths == [tmp_path / "cpu,cpuacct/job/rollout-x"]


def test_a_group_is_removed(tmp_path):
    folder = tmp_path / "group"
    folder.mkdir()
    group = ControlGroup({"memory": folder, "pids": folder})
    assert group.remove()
    assert not folder.exists()
    assert group.remove()


VIOLATED = ResourceLimits(memory_bytes=3 << 29, max_processes=10, cpus=None, disk_bytes=100)


def make_monitor(folder: Path, **files: str) -> LimitMonitor:
    """Return a monitor over a group with both controllers; the launcher has four tasks."""
    standard = {"memory.events": "oom 3\noom_kill 0\n", "pids.current": "5", "pids.peak": "5", "pids.max": ""}
    for name, text in {**standard, **files}.items():
        (folder / name).write_text(text)
    return LimitMonitor(VIOLATED, ControlGroup({"memory": folder, "pids": folder}), None, None, Counter())


def test_each_caller_sees_a_violation_once(tmp_path):
    monitor = make_monitor(tmp_path)
    first, second = LimitViolations(monitor), LimitViolations(monitor)
    assert first.drain() == ()
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    (told,) = first.drain()
    assert told.limit == "memory"
    assert "1.5 GiB" in str(told)
    assert first.drain() == ()
    assert [violation.limit for violation in second.drain()] == ["memory"]
    assert monitor.tally == {"memory": 3}
    monitor.close()


def test_version_1_counts_kills_too(tmp_path):
    path = tmp_path / "memory.oom_control"
    monitor = make_monitor(tmp_path, **{path.name: "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"})
    seen = LimitViolations(monitor)
    path.write_text("oom_kill_disable 0\nunder_oom 1\noom_kill 1\n")
    assert [violation.limit for violation in seen.drain()] == ["memory"]
    monitor.close()


def test_a_full_group_is_reported_again_only_after_it_had_room(tmp_path):
    monitor = make_monitor(tmp_path)
    seen = LimitViolations(monitor)
    (tmp_path / "pids.peak").write_text("13\n")
    assert seen.drain() == ()
    (tmp_path / "pids.peak").write_text("14\n")  # over by now, but the kernel remembers
    assert [str(violation) for violation in seen.drain()] == ["the sandbox reached its limit of 10 processes"]
    for current, told in (("14", 0), ("6", 0), ("14", 1), ("14", 0)):
        (tmp_path / "pids.current").write_text(current)
        assert len(seen.drain()) == told
    monitor.close()


def test_a_call_adds_its_own_limits(tmp_path):
    monitor = make_monitor(tmp_path)
    seen = LimitViolations(monitor)
    monitor.record("disk")
    assert [violation.limit for violation in seen.drain_with_call(2.5, 1000)] == ["disk", "time", "output"]
    assert "2.5 s" in str(seen.drain_with_call(2.5, None)[0])
    assert seen.drain_with_call(None, None) == ()
    assert monitor.tally == {"disk": 1, "time": 2, "output": 1}
    monitor.close()


def test_a_closed_monitor_keeps_what_it_knew(tmp_path):
    monitor = make_monitor(tmp_path)
    seen = LimitViolations(monitor)
    assert monitor.make_errors() == ()
    monitor.record("memory")
    monitor.record("lifetime")
    assert [error.limit for error in monitor.make_errors()] == ["memory"], "the others are not the sandbox's"
    monitor.close()
    monitor.close()
    for path in tmp_path.iterdir():
        path.unlink()
    assert [violation.limit for violation in seen.drain()] == ["memory", "lifetime"]


def test_groups_without_counters_report_no_violation(tmp_path):
    monitor = LimitMonitor(VIOLATED, ControlGroup({"memory": tmp_path, "pids": tmp_path}), None, None, Counter())
    assert LimitViolations(monitor).drain() == ()
    (tmp_path / "pids.current").write_text("max")
    monitor.close()
    assert monitor.read_counts() == {}


NONE = ResourceLimits(None, None, None)


def test_descendants_are_found_and_nobody_else():
    process = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & echo up; wait"], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"up\n"
        below = Processes().descendants(process.pid)
        assert {found.parent for found in below} == {process.pid}
        assert len(below) == 2
        assert all(found.threads == 1 and found.start > 0 for found in below)
        assert Processes().inside(process.pid) == []  # not in a sandbox, since it has no separate namespace
    finally:
        for found in Processes().descendants(process.pid):
            os.kill(found.pid, signal.SIGKILL)
        process.communicate()
    assert Processes().descendants(process.pid) == []


@pytest.mark.parametrize(("name", "unit"), [("cpuacct.usage", 10**9), ("cpu.stat", 10**6)])
def test_a_busy_sandbox_yields_until_it_rests(tmp_path, name, unit):
    def use(seconds: float) -> None:
        used = int(seconds * unit)
        (tmp_path / name).write_text(f"{used}\n" if name == "cpuacct.usage" else f"usage_usec {used}\nx 1\n")

    (tmp_path / "cpu.idle").write_text("unset")
    use(0)
    yielding = ProcessorYield(ControlGroup({"cpu": tmp_path, "cpuacct": tmp_path}))
    looks = (
        (0, "unset"),
        (0.4, "unset"),
        (1.3, "unset"),
        (2.2, "1\n"),
        (3.1, "1\n"),
        (3.2, "0\n"),
        (4.1, "0\n"),
    )
    for now, (used, idle) in enumerate(looks):
        use(used)
        yielding.check(now)
        assert (tmp_path / "cpu.idle").read_text() == idle
    yielding.close()
    yielding.check(5.0)


def test_only_sandboxes_without_enforcing_groups_are_scanned(tmp_path):
    limits = ResourceLimits(1 << 30, 10, None)
    whole = ControlGroup({"memory": tmp_path, "pids": tmp_path})
    for group, needs_scan in ((whole, False), (ControlGroup({"pids": tmp_path}), True), (None, True)):
        monitor = LimitMonitor(limits, group, os.getpid(), None, Counter())
        assert WatchedSandbox(monitor).needs_scan == needs_scan
        monitor.close()
    assert not WatchedSandbox(LimitMonitor(NONE, None, os.getpid(), None, Counter())).needs_scan


def test_the_thread_ends_with_the_last_sandbox():
    watchdog = Watchdog()
    monitor = LimitMonitor(NONE, None, None, None, Counter())
    watchdog.add(monitor)
    assert _threads() >= 1
    monitor.close()
    deadline = time.monotonic() + 30
    while watchdog.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watchdog.add(monitor)
    watchdog.close()


@pytest.mark.parametrize("scan", [False, True])
def test_a_sandbox_that_cannot_be_checked_does_not_keep_others_from_that(monkeypatch, scan):
    checked = []

    def check(ward: WatchedSandbox, *args: object) -> None:
        checked.append(ward)
        if len(checked) == 1:
            raise OSError("its file system is gone")

    monkeypatch.setattr(WatchedSandbox, "check_processes" if scan else "check", check)
    limits = ResourceLimits(1 << 40, None, None)
    wards = [WatchedSandbox(LimitMonitor(limits, None, os.getpid(), None, Counter())) for _ in range(2)]
    Watchdog()._check(wards)
    assert checked == wards


def test_a_file_system_whose_server_has_ended_is_not_full(monkeypatch, tmp_path):
    monkeypatch.setattr("sandboxes.limits.violations._open_space", lambda *_: os.open(tmp_path, os.O_PATH))
    monitor = LimitMonitor(NONE, None, None, tmp_path, Counter())

    def gone(_: int) -> None:
        raise OSError(errno.ENOTCONN, "transport endpoint is not connected")

    monkeypatch.setattr(os, "fstatvfs", gone)
    assert monitor.read_counts() == {}
    monitor.close()


def _threads() -> int:
    return sum(thread.name == "sandbox-watchdog" for thread in threading.enumerate())


HOLDER = """
import ctypes, os, select, sys
held = [select.epoll() for _ in range(int(sys.argv[1]))] + [os.dup(0) for _ in range(int(sys.argv[2]))]
if len(sys.argv) > 3: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, *request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.mark.parametrize("holder", [["100", "200"]], indirect=True)
def test_instances_times_descriptors(holder):
    assert not exceeds([holder.pid], 100 * 320)
    assert exceeds([holder.pid], 20_000)
    assert exceeds([holder.pid, holder.pid], 40_000), "of all together"


@pytest.mark.parametrize("holder", [["3", "20"], ["0", "400"]], indirect=True)
def test_ordinary_programs_have_almost_none(holder):
    assert not exceeds([holder.pid], 3 * 50)


@pytest.mark.parametrize("holder", [["100", "200", "hidden"]], indirect=True)
def test_a_process_that_cannot_be_inspected_counts_with_its_maximum(holder):
    assert exceeds([holder.pid], 20_000)


def test_an_ended_process_exceeds_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not exceeds([process.pid], 0)


def test_all_sandboxes_together_leave_half():
    one = watches_per_sandbox(1)
    assert one is not None
    assert watches_per_sandbox(10) == pytest.approx(one / 10, abs=1)
    assert watches_per_sandbox(0) == one


CAPACITY, INTERVAL = 5, 5.0


class Clock:
    """Time that passes only in `anyio.sleep`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(anyio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_full_bucket_serves_a_burst_at_once_and_then_one_in_each_interval(monkeypatch):
    clock = Clock(monkeypatch)
    bucket = TokenBucket(CAPACITY, INTERVAL)
    for _ in range(CAPACITY):
        await bucket.take()
    assert clock.now == 100.0
    for _ in range(4):
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
