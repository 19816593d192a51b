"""Each caller is told once of every limit that was reached, on files that look like the kernel's."""

from collections import Counter
from pathlib import Path

from sandboxes.limits.cgroups import ControlGroup, ResourceLimits
from sandboxes.limits.violations import LimitMonitor, LimitViolations

LIMITS = ResourceLimits(memory_bytes=3 << 29, max_processes=10, cpus=None, disk_bytes=100)


def make_monitor(folder: Path, **files: str) -> LimitMonitor:
    """Return a monitor over a group with both controllers; the launcher has four tasks."""
    standard = {"memory.events": "oom 3\noom_kill 0\n", "pids.current": "5", "pids.peak": "5", "pids.max": ""}
    for name, text in {**standard, **files}.items():
        (folder / name).write_text(text)
    return LimitMonitor(LIMITS, ControlGroup({"memory": folder, "pids": folder}), None, None, Counter())


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
    monitor = LimitMonitor(
        LIMITS, ControlGroup({"memory": tmp_path, "pids": tmp_path}), None, None, Counter()
    )
    assert LimitViolations(monitor).drain() == ()
    (tmp_path / "pids.current").write_text("max")
    monitor.close()
    assert monitor.read_counts() == {}
