"""Archives of artifacts are unpacked only below their own path, and share a bounded part of the host's disk."""

import io
import tarfile
import tracemalloc

import anyio
import psutil
import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.builtin.code.environment import Code
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings
from rollout_service.episodes import WorkClock
from rollout_service.pipeline.artifacts import IN_MEMORY_BYTES, Artifacts, DiskBudget, require_safe
from rollout_service.pipeline.sandbox_source import SandboxSource
from sandboxes import SandboxSpec
from sandboxes.errors import FileTooLargeError, SandboxFileError
from sandboxes.runtime.tree_reader import stays_within
from tests.support.processes.children import children
from tests.support.waiting import until

MIB = 1 << 20


def packed(*entries):
    """Return an archive of entries, each given as name, kind, link target and mode."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, target, mode in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = kind, target, mode
            archive.addfile(entry)
    buffer.seek(0)
    return buffer


FOLDER = ("w", tarfile.DIRTYPE, "", 0o755)
FILE = ("w/f", tarfile.REGTYPE, "", 0o644)


def test_an_archive_below_its_own_path_is_unpacked(tmp_path):
    links = [("w/g", tarfile.LNKTYPE, "w/f", 0o644), ("w/l", tarfile.SYMTYPE, "f", 0o777)]
    for entries in ([FOLDER, FILE, *links, ("w/a", tarfile.SYMTYPE, "/w/f", 0o777)], []):
        archive = packed(*entries)
        require_safe(archive, "/")
        archive.seek(0)
        with tarfile.open(fileobj=archive) as opened:
            # Python has filters since 3.11.4, and a strict one by default since 3.14.
            opened.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            opened.extractall(tmp_path)
        found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
        assert found >= {name for name, *_ in entries}
        assert (tmp_path / "w/l").resolve() == tmp_path / "w/f"


@pytest.mark.parametrize(
    "entry",
    [
        ("usr/local/sbin/bash", tarfile.REGTYPE, "", 0o755),
        ("/w/f", tarfile.REGTYPE, "", 0o644),
        ("w/../f", tarfile.REGTYPE, "", 0o644),
        ("w/missing/f", tarfile.REGTYPE, "", 0o644),
        ("w/f/below", tarfile.REGTYPE, "", 0o644),
        ("w/l/below", tarfile.REGTYPE, "", 0o644),
        ("second", tarfile.DIRTYPE, "", 0o755),
        ("w/pipe", tarfile.FIFOTYPE, "", 0o644),
        ("w/disk", tarfile.BLKTYPE, "", 0o644),
        ("w/tty", tarfile.CHRTYPE, "", 0o644),
        ("w/h", tarfile.LNKTYPE, "etc/passwd", 0o644),
        ("w/h", tarfile.LNKTYPE, "w/none", 0o644),
        ("w/s", tarfile.SYMTYPE, "/etc/passwd", 0o777),
        ("w/s", tarfile.SYMTYPE, "../etc/passwd", 0o777),
        ("w/s", tarfile.REGTYPE, "", 0o4755),
        ("w", tarfile.REGTYPE, "", 0o644),
    ],
    ids=lambda entry: f"{entry[0]}-{entry[1].decode()}-{entry[2]}",
)
def test_an_archive_that_leads_out_of_its_path_is_refused(entry):
    before = [FOLDER, FILE, ("w/l", tarfile.SYMTYPE, "f", 0o777)] if entry[0] != "w" else [FOLDER, FOLDER]
    with pytest.raises(SandboxFileError):
        require_safe(packed(*before, entry), "/")


@pytest.mark.parametrize(
    ("target", "below", "stays"),
    [
        ("f", ["w"], True),
        ("..", ["w", "a"], True),
        ("../b/c", ["w", "a"], True),
        ("../..", ["w", "a"], False),
        ("..", ["w"], False),
        ("a/..", ["w"], False),  # `a` may be a link to somewhere else
        ("a/../../..", ["w", "b"], False),
        ("/w/f", ["w"], True),
        ("/w/../etc", ["w"], False),
        ("/workspace", ["w"], False),
        ("./f/.//g", ["w"], True),
    ],
)
def test_links_are_judged_by_their_text_alone(target, below, stays):
    assert stays_within(target, below, "/w") is stays


@pytest.mark.slow
async def test_all_artifacts_together_stay_within_the_budget():
    budget, held = DiskBudget(8 * MIB), []
    most = 0

    async def stream(size):
        for _ in range(size // 65_536):
            await anyio.lowlevel.checkpoint()
            yield bytes(65_536)

    async def rollout():
        nonlocal most
        artifacts = Artifacts(budget, limit=2 * MIB)
        await artifacts.add("/workspace", stream(3 * MIB))
        await artifacts.settle()
        held.append(artifacts)
        most = max(most, len(held))
        await anyio.sleep(0.01)
        held.remove(artifacts)
        await artifacts.close()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(rollout)
    assert 1 <= most <= 2
    await budget.reserve(8 * MIB)  # the whole budget was returned


async def test_small_artifacts_do_not_wait_and_cancelled_ones_release_their_room():
    budget = DiskBudget(4 * MIB)
    await budget.reserve(4 * MIB)
    artifacts = Artifacts(budget, limit=2 * MIB)

    async def stream(size):
        yield bytes(size)

    await artifacts.add("/workspace/small", stream(1000))
    with anyio.move_on_after(0.05) as scope:
        await artifacts.add("/workspace/large", stream(IN_MEMORY_BYTES))
    assert scope.cancelled_caught
    with pytest.raises(FileTooLargeError):
        await artifacts.add("/workspace/larger", stream(5 * MIB))
    await artifacts.close()
    await budget.give_back(4 * MIB)
    with anyio.fail_after(1):
        await budget.reserve(4 * MIB)


async def test_small_artifacts_do_not_overtake_large_ones_for_ever():
    budget, order = DiskBudget(10), []

    async def reserve(count):
        await budget.reserve(count)
        order.append(count)

    await budget.reserve(6)
    async with anyio.create_task_group() as tasks:
        for count in (8, 2):
            tasks.start_soon(reserve, count)
            await anyio.wait_all_tasks_blocked()
        await budget.give_back(6)
    assert order == [8, 2]


def spec(**changes):
    return EnvironmentSpec(name="e", image="base", evaluate_in=EvaluateIn.FRESH, **changes)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/usr",
        "/usr/local/sbin",
        "/etc",
        "/etc/ld.so.preload",
        "/bin/bash",
        "/./lib64",
        "/environment",
        "w",
    ],
)
def test_folders_of_programs_are_not_artifacts(path):
    with pytest.raises(ConfigurationError, match="artifact"):
        Code(spec(artifacts=[path]))


def test_folders_of_the_agents_are():
    paths = ["/workspace", "/tmp/out", "/etc/nginx", "/root/report", "/usrlocal"]
    assert list(Code(spec(artifacts=paths)).spec.artifacts) == paths


def test_artifacts_leave_room_for_the_grader():
    assert spec().artifacts_bytes == 256 * MIB
    assert spec(sandbox=SandboxSettings(disk="64M")).artifacts_bytes == 32 * MIB
    assert spec(sandbox=SandboxSettings(memory="128M")).artifacts_bytes == 64 * MIB
    assert spec(artifacts_size="1M").artifacts_bytes == MIB


@pytest.mark.slow
def test_an_archive_of_long_names_takes_little_memory():
    inner = "/".join(["w", *["n" * 200] * 18])
    chain = ["/".join(inner.split("/")[: depth + 1]) for depth in range(19)]
    folders = [(name, tarfile.DIRTYPE, "", 0o755) for name in chain]
    archive = packed(*folders, *((f"{inner}/{at}", tarfile.REGTYPE, "", 0o644) for at in range(2_000)))
    tracemalloc.start()
    try:
        require_safe(archive, "/")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIB  # the names alone are 7 MiB


def written_by(pid):
    """Return how many bytes a process has written."""
    return psutil.Process(pid).io_counters().write_chars


async def test_a_pack_cancelled_while_waiting_for_room_ends_its_reader_first(provider):
    source, wanted = SandboxSource(provider, artifacts_bytes=4 * MIB), spec(artifacts=["/workspace"])
    left = set()
    sandbox = await provider.start(SandboxSpec())
    await sandbox.write_file("large", bytes(2 * MIB - 8192))
    first = await source.pack(sandbox, wanted, WorkClock())
    others = children()

    async def pack():
        try:
            await source.pack(sandbox, wanted, WorkClock())
        finally:
            left.update(children() - others)  # while the cancellation propagates

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pack)
            await until(lambda: any(written_by(pid) > MIB for pid in children() - others))
            tasks.cancel_scope.cancel()
    await first.close()
    await sandbox.close()
    assert left == set()
