"""Which limits were reached, on files that look like the kernel's."""

from collections import Counter
from pathlib import Path

from sandboxes.limits.cgroups import Group, Limits
from sandboxes.limits.violations import Breaches, LimitWatch

LIMITS = Limits(memory_bytes=3 << 29, max_processes=10, cpus=None, disk_bytes=100)


def make_watch(folder: Path, **files: str) -> LimitWatch:
    """A watch over a group of both controllers; the launcher has four tasks."""
    standard = {"memory.events": "oom 3\noom_kill 0\n", "pids.current": "5", "pids.peak": "5", "pids.max": ""}
    for name, text in {**standard, **files}.items():
        (folder / name).write_text(text)
    return LimitWatch(LIMITS, Group({"memory": folder, "pids": folder}), None, None, Counter())


def test_each_caller_is_told_once(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    first, second = Breaches(watch), Breaches(watch)
    assert first.new() == ()
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    (told,) = first.new()
    assert told.limit == "memory"
    assert "1.5 GiB" in str(told)
    assert first.new() == ()
    assert [breach.limit for breach in second.new()] == ["memory"]
    assert watch.tally == {"memory": 3}
    watch.close()


def test_version_1_counts_kills_too(tmp_path: Path) -> None:
    path = tmp_path / "memory.oom_control"
    watch = make_watch(tmp_path, **{path.name: "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"})
    seen = Breaches(watch)
    path.write_text("oom_kill_disable 0\nunder_oom 1\noom_kill 1\n")
    assert [breach.limit for breach in seen.new()] == ["memory"]
    watch.close()


def test_a_full_group_is_told_again_only_after_it_had_room(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    seen = Breaches(watch)
    (tmp_path / "pids.peak").write_text("13\n")
    assert seen.new() == ()
    (tmp_path / "pids.peak").write_text("14\n")  # over by now: the kernel remembers
    assert [str(breach) for breach in seen.new()] == ["the sandbox's limit of processes (10) was reached"]
    for current, told in (("14", 0), ("6", 0), ("14", 1), ("14", 0)):
        (tmp_path / "pids.current").write_text(current)
        assert len(seen.new()) == told
    watch.close()


def test_a_call_adds_its_own_limits(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    seen = Breaches(watch)
    watch.note("disk")
    assert [breach.limit for breach in seen.of_call(2.5, 1000)] == ["disk", "time", "output"]
    assert "2.5 s" in str(seen.of_call(2.5, None)[0])
    assert seen.of_call(None, None) == ()
    assert watch.tally == {"disk": 1, "time": 2, "output": 1}
    watch.close()


def test_a_closed_watch_keeps_what_it_knew(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    seen = Breaches(watch)
    watch.note("memory")
    watch.close()
    watch.close()
    for path in tmp_path.iterdir():
        path.unlink()
    assert [breach.limit for breach in seen.new()] == ["memory"]


def test_groups_that_tell_nothing_are_no_breach(tmp_path: Path) -> None:
    watch = LimitWatch(LIMITS, Group({"memory": tmp_path, "pids": tmp_path}), None, None, Counter())
    assert Breaches(watch).new() == ()
    (tmp_path / "pids.current").write_text("max")
    watch.close()
    assert watch.counts() == {}
