"""A sandbox is frozen only between its uses, whatever fails or is cancelled; its group looks like the kernel's."""

import anyio
import pytest

from sandboxes.errors import SandboxConfigError, SandboxPauseError, SandboxResumeError
from sandboxes.limits import cgroups, freezer
from sandboxes.limits.cgroups import ControlGroup, find_control_groups
from sandboxes.limits.freezer import Freezer


@pytest.fixture
def stopped(monkeypatch):
    """Return the event at which the kernel has stopped everything."""
    event = anyio.Event()

    async def wait(events):
        await event.wait()

    monkeypatch.setattr(freezer, "_wait_until_frozen", wait)
    return event


@pytest.fixture
def group(tmp_path):
    (tmp_path / "cgroup.freeze").write_text("0\n")
    return ControlGroup({"freezer": tmp_path})


def is_frozen(group):
    return (group.folders["freezer"] / "cgroup.freeze").read_text() == "1\n"


async def test_a_use_lets_it_run_and_keeps_it_from_being_frozen(group, stopped):
    stopped.set()
    one = Freezer(group)
    assert await one.freeze()
    assert one.frozen
    assert is_frozen(group)
    with one:
        assert not is_frozen(group)
        with one:
            pass
        assert not await one.freeze()
        assert not is_frozen(group)
    assert await one.freeze()


async def test_a_use_that_begins_while_it_stops_wins_at_once(group, stopped):
    one, found = Freezer(group), []

    async def freeze():
        found.append(await one.freeze())

    with anyio.fail_after(freezer.FREEZE_SECONDS / 2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(freeze)
            tasks.start_soon(freeze)
            await anyio.wait_all_tasks_blocked()
            assert is_frozen(group)
            with one:
                assert not is_frozen(group)
                await anyio.wait_all_tasks_blocked()
                assert found == [False, False]


async def test_a_cancelled_freeze_is_undone_by_the_next_use(group, stopped):
    one = Freezer(group)
    with anyio.move_on_after(0.01):
        await one.freeze()
    with one:
        assert not is_frozen(group)
    stopped.set()
    assert await one.freeze()


async def test_what_does_not_stop_runs(group, stopped, monkeypatch):
    monkeypatch.setattr(freezer, "FREEZE_SECONDS", 0.01)
    one = Freezer(group)
    with pytest.raises(SandboxPauseError, match="did not stop"):
        await one.freeze()
    assert not one.frozen
    assert not is_frozen(group)


async def test_a_refusal_of_the_kernel_is_a_typed_error(group, stopped, tmp_path):
    stopped.set()
    one = Freezer(group)
    assert await one.freeze()
    (tmp_path / "cgroup.freeze").unlink()
    (tmp_path / "cgroup.freeze").mkdir()
    for _ in range(2):
        with pytest.raises(SandboxResumeError, match="cannot be resumed") as caught, one:
            pytest.fail("it was used")
        assert caught.value.retryable
    one.close()
    with pytest.raises(SandboxPauseError, match="cannot be paused"):
        await Freezer(group).freeze()


async def test_a_closed_one_is_not_frozen(group, stopped):
    one = Freezer(group)
    one.close()
    assert not await one.freeze()
    assert not is_frozen(group)


@pytest.mark.parametrize("folders", [None, {}, {"memory": "."}])
async def test_without_a_freezer_it_is_refused(folders):
    one = Freezer(None if folders is None else ControlGroup(folders))
    with pytest.raises(SandboxConfigError):
        await one.freeze()
    with one:
        assert await one.reclaim() == 0


# How memory is given back, and where.


def memory_group(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)
    return ControlGroup({"memory": folder})


def shrinking(monkeypatch, usage):
    """Let a group lose 64 MB with each write to its reclaiming file, down to 40 MB; return what was written."""
    written = []

    def write(path, value):
        written.append((path.name, str(value)))
        if path.name in cgroups.RECLAIMS:
            usage.write_text(f"{max(40 << 20, int(usage.read_text()) - (64 << 20))}\n")

    monkeypatch.setattr(cgroups, "_write", write)
    return written


def test_version_2_gives_memory_back_piece_by_piece_and_may_swap_only_meanwhile(tmp_path, monkeypatch):
    files = {"memory.current": f"{200 << 20}\n", "memory.max": "max\n", "memory.reclaim": ""}
    group = memory_group(tmp_path, files | {"memory.swap.max": "0\n"})
    written = shrinking(monkeypatch, tmp_path / "memory.current")
    left = [True, True, False]
    assert group.reclaim(lambda: left.pop(0)) == 128 << 20
    assert group.reclaim(lambda: True) == 32 << 20
    piece = ("memory.reclaim", str(cgroups.RECLAIM_BYTES))
    swap = [("memory.swap.max", "max"), ("memory.swap.max", "0")]
    assert written == [swap[0], piece, piece, swap[1], swap[0], piece, piece, swap[1]]


def test_version_1_gives_back_what_it_can(tmp_path, monkeypatch):
    group = memory_group(tmp_path, {"memory.usage_in_bytes": f"{100 << 20}\n", "memory.force_empty": ""})
    written = shrinking(monkeypatch, tmp_path / "memory.usage_in_bytes")
    assert group.reclaim(lambda: True) == 60 << 20
    assert {name for name, _ in written} == {"memory.force_empty"}


@pytest.mark.parametrize(
    ("files", "swaps", "found"),
    [
        ({"memory.reclaim"}, 2, "none"),
        ({"cgroup.freeze"}, 2, "processes"),
        ({"cgroup.freeze", "memory.reclaim"}, 1, "files"),
        ({"cgroup.freeze", "memory.reclaim"}, 2, "memory"),
        (None, 2, "none"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_what_a_pause_does_here_is_known(tmp_path, monkeypatch, files, swaps, found, version):
    (tmp_path / "swaps").write_text("line\n" * swaps)
    monkeypatch.setattr(cgroups, "SWAPS", tmp_path / "swaps")
    monkeypatch.setattr(cgroups, "_files_of_group", lambda parent: files)
    if version == 1:
        for name in ("memory", "unified"):
            (tmp_path / name / "own").mkdir(parents=True)
        groups = find_control_groups(tmp_path, "4:memory:/own\n0::/own\n")
        places = groups.paths_of("x")
        assert places.get("freezer") == (None if found == "none" else tmp_path / "unified/own/rollout-x")
    else:
        (tmp_path / "own").mkdir()
        (tmp_path / "cgroup.controllers").write_text("memory pids")
        for name in ("cgroup.controllers", "cgroup.subtree_control"):
            (tmp_path / "own" / name).write_text("memory pids")
        groups = find_control_groups(tmp_path, "0::/own\n")
    assert groups.pausing == found
