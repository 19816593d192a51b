"""A sweep removes whatever dead services left, and touches neither live services nor anything else."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.host.processes import MARKER
from sandboxes.reclaim.guard import Guard
from sandboxes.reclaim.reaper import OWNER, SweepReport, reclaim, sweep, sweep_service
from sandboxes.reclaim.run_folders import ServiceFolder
from tests.support.processes.children import killed
from tests.support.processes.service import eventually

pytestmark = pytest.mark.slow

SLEEP = [sys.executable, "-c", "print(flush=True); import signal; signal.pause()"]


def dead_service(base: Path, sandboxes: int = 1) -> Path:
    """Create what a killed service leaves: its folder, unlocked."""
    service = ServiceFolder(base)
    service.describe([])
    for _ in range(sandboxes):
        service.new().create(os.geteuid(), os.getegid())
    service.close()
    return service.path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Collect the processes of a test, whatever its outcome."""
    with ExitStack() as made:
        yield made


def start_marked(stack: ExitStack, mark: str) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(SLEEP, stdout=subprocess.PIPE, env={**os.environ, MARKER: mark})
    process = stack.enter_context(killed(started))
    process.stdout.readline()
    return process


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o711)
    return folder


@pytest.fixture
def service(base: Path) -> Iterator[ServiceFolder]:
    folder = ServiceFolder(base)
    folder.describe([])
    yield folder
    folder.close()


def test_a_dead_service_is_swept_with_its_processes(base, stack):
    folder = dead_service(base, 2)
    process = start_marked(stack, f"{folder.name}-1")
    assert sweep(base) == SweepReport(2, 1)
    assert process.wait() == -signal.SIGKILL
    assert list(base.iterdir()) == []
    assert sweep(base) == SweepReport()


def test_a_live_service_is_not_swept(base, service, stack):
    service.new().create(os.geteuid(), os.getegid())
    process = start_marked(stack, f"{service.name}-1")
    assert sweep(base) == SweepReport()
    assert sweep_service(service.path) is None
    assert process.poll() is None
    assert (service.path / "1").exists()


def test_other_entries_are_not_touched(base):
    for name in ("0123456", "0123456789", "ABCDEF01", "notes"):
        (base / name).mkdir()
    (base / "0000000f").symlink_to(base / "notes")
    (base / "0000000e").touch()
    assert sweep(base) == SweepReport()
    assert len(list(base.iterdir())) == 6


@pytest.mark.parametrize("of", ["host", "user"])
def test_a_folder_of_another_host_or_user_is_not_touched(base, monkeypatch, of):
    folder, name, user = dead_service(base), socket.gethostname(), os.geteuid()
    changed = (socket, "gethostname", lambda: f"not-{name}") if of == "host" else (os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(*changed)
    assert sweep(base) == SweepReport()
    assert (folder / "1").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.sampled_from(["groups", "pid", "x"]), below),
    max_leaves=6,
)


@given(st.one_of(st.binary(), JSON.map(lambda value: json.dumps(value).encode())))
def test_a_damaged_owner_file_does_not_stop_the_sweep(tmp_path_factory, damage):
    base = tmp_path_factory.mktemp("run")
    folder = dead_service(base)
    (folder / OWNER).write_bytes(damage)
    assert sweep(base) == SweepReport(1)
    assert list(base.iterdir()) == []


def test_control_groups_outside_the_hierarchy_are_ignored(base, tmp_path):
    folder = dead_service(base)
    victim = tmp_path / f"rollout-{folder.name}-1"
    victim.mkdir()
    groups = [
        str(tmp_path / f"rollout-{folder.name}"),
        f"/sys/fs/cgroup/../../{victim}",
        "/sys/fs/cgroup/memory",
    ]
    (folder / OWNER).write_text(json.dumps({"groups": groups}))
    assert sweep(base) == SweepReport(1)
    assert victim.exists()


def test_a_service_killed_before_its_owner_file(base):
    (base / "0123abcd").mkdir()
    assert sweep(base) == SweepReport()
    assert list(base.iterdir()) == []


def test_processes_are_ended_even_without_the_folder(base, stack):
    process = start_marked(stack, "0c0c0c0c-3")
    swept = sweep_service(base / "0c0c0c0c")
    assert swept == SweepReport(0, 1)
    assert process.wait() == -signal.SIGKILL


def test_many_sweeps_at_once_do_no_harm(base, service):
    service.new().create(os.geteuid(), os.getegid())
    for _ in range(6):
        dead_service(base, 3)
    results: list[SweepReport] = []
    threads = [threading.Thread(target=lambda: results.append(sweep(base))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(result.sandboxes for result in results) == 18, "each by one alone"
    assert not any(result.failures for result in results)
    assert list(base.iterdir()) == [service.path]
    assert (service.path / "1/pipes").exists()


def test_services_start_while_others_sweep(base):
    """A folder that is not locked yet looks dead; the service that loses the race takes another name."""
    stop = threading.Event()

    def sweeping() -> None:
        while not stop.is_set():
            sweep(base)

    sweeper = threading.Thread(target=sweeping)
    sweeper.start()
    try:
        services = [ServiceFolder(base) for _ in range(40)]
        for one in services:
            one.describe([])
        assert all(one.intact for one in services)
        assert len({one.name for one in services}) == 40
    finally:
        stop.set()
        sweeper.join()
    for one in services:
        assert reclaim(one.path, []).failures == ()
        one.close()


def test_the_guard_is_small_and_ends_when_the_service_closes(base, service, stack):
    guard = Guard(service.path, [])
    stack.enter_context(killed(guard.process))
    assert guard.alive
    rollup = Path(f"/proc/{guard.process.pid}/smaps_rollup")
    status = Path(f"/proc/{guard.process.pid}/status")
    eventually(lambda: "\nSigIgn:\t0000000000004a03\n" in status.read_text())
    kilobytes = next(int(line.split()[1]) for line in rollup.read_text().splitlines() if line[:4] == "Pss:")
    assert kilobytes < 4_000
    assert os.getsid(guard.process.pid) == guard.process.pid, "a session of its own"
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        guard.process.send_signal(name)
    assert guard.alive
    guard.dismiss(clean=True)
    assert guard.process.returncode == 0
    assert service.path.exists()


def test_the_guard_sweeps_after_a_death(base, stack):
    service = ServiceFolder(base)
    service.describe([])
    service.new().create(os.geteuid(), os.getegid())
    process = start_marked(stack, f"{service.name}-1")
    guard = Guard(service.path, [])
    stack.enter_context(killed(guard.process))
    service.close()
    guard.dismiss(clean=False)
    assert process.wait(20) == -signal.SIGKILL
    assert guard.process.wait(20) == 0
    assert list(base.iterdir()) == []


def test_the_guard_spares_a_live_service_that_lost_its_pipe(base, stack):
    service = ServiceFolder(base)
    service.describe([])
    process = start_marked(stack, f"{service.name}-1")
    guard = Guard(service.path, [])
    stack.enter_context(killed(guard.process))
    guard.dismiss(clean=False)
    eventually(lambda: b"guard" not in Path(f"/proc/{guard.process.pid}/cmdline").read_bytes().split(b"\0"))
    assert sweep(base) == SweepReport()
    assert guard.alive
    assert process.poll() is None
    service.close()
    assert process.wait(20) == -signal.SIGKILL
    assert guard.process.wait(20) == 0


def test_a_sweep_that_was_killed_is_finished_by_the_next(base):
    for delay in (0.0, 0.01, 0.03, 0.06, 0.1):
        folder = dead_service(base, 20)
        code = "import sys; from pathlib import Path; from sandboxes.reclaim.reaper import sweep; print(flush=True); "
        code += "sweep(Path(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(base)]
        with killed(subprocess.Popen(command, stdout=subprocess.PIPE)) as sweeper:
            sweeper.stdout.readline()
            time.sleep(delay)
        assert sweep(base).failures == ()
        assert not folder.exists()


def test_the_sweep_needs_only_the_standard_library(tmp_path):
    import sandboxes.reclaim.guard as module

    code = module.SWEEP.partition("; from")[0] + "; import sandboxes.reclaim.guard; print(sorted(sys.modules))"
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(module.__file__).parents[1])]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "sandboxes.reclaim.reaper" in found
    assert "site-packages" not in found
    assert not any(name in found for name in ("'anyio'", "'pydantic'", "'sandboxes.contract'"))
