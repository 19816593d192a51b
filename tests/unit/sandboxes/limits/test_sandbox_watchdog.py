"""The watchdog finds a sandbox's real processes, and slows busy ones in control groups of plain files."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter

import pytest

from sandboxes.limits.cgroups import ControlGroup, ResourceLimits
from sandboxes.limits.violations import LimitMonitor
from sandboxes.limits.watchdog import Processes, ProcessorYield, Watchdog, WatchedSandbox

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


def _threads() -> int:
    return sum(thread.name == "sandbox-watchdog" for thread in threading.enumerate())
