"""Control groups of both versions enforce limits where they can, on plain files that look like the kernel's."""

from pathlib import Path

import pytest

from sandboxes.limits.cgroups import SPARE_PROCESSES, ControlGroup, ResourceLimits, find_control_groups

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
