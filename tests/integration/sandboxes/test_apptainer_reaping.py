"""No sandbox outlives its service by more than seconds, even after kill -9 of service, guard or both at any moment."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
import pytest

from sandboxes import (
    ApptainerConfig,
    SandboxClosedError,
    SandboxProvider,
    SandboxSpec,
    SandboxStartError,
    make_provider,
)
from sandboxes.host.processes import find_processes, processes_of, sandbox_of
from sandboxes.limits.cgroups import find_control_groups
from tests.support.users.as_user import ordinary_user

pytestmark = pytest.mark.apptainer
ALLOWED_SECONDS = 5.0

OWNER = """
import sys, anyio
from pathlib import Path
from sandboxes import ApptainerConfig, SandboxSpec, make_provider

async def start(provider):
    sandbox = await provider.start(SandboxSpec())
    await (await sandbox.bash()).run("setsid sleep 1000 & disown; nohup sleep 1000 & sleep 1000 & mkdir -m 0 a")
    return sandbox

async def main():
    provider = make_provider(ApptainerConfig(run_dir=sys.argv[1]), Path(sys.argv[2]))
    print("begin", flush=True)
    if sys.argv[3] == "close":
        sandboxes = [await start(provider) for _ in range(2)]
        print("ready", flush=True)
        sys.stdin.readline()
        async with anyio.create_task_group() as tasks:
            for sandbox in sandboxes:
                tasks.start_soon(sandbox.close)
    elif sys.argv[3] == "start":
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(start, provider)
    elif sys.argv[3] == "bomb":
        sandbox = await provider.start(SandboxSpec(max_processes=64))
        await (await sandbox.bash()).run("bomb() { bomb | bomb & }; bomb", timeout=1)
    elif sys.argv[3] == "paused":
        for _ in range(2):
            sandbox = await start(provider)
            assert provider.pausing == "none" or await sandbox.pause()
    elif sys.argv[3] == "snapshot":
        snapshot = await (await start(provider)).snapshot()
        await provider.start(SandboxSpec(snapshot=snapshot))
    else:
        for _ in range(2):
            await start(provider)
    print("ready", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


@dataclass
class Owner:
    """A service in a separate process."""

    process: subprocess.Popen[str]
    run: Path

    def until(self, line: str) -> None:
        while (said := self.process.stdout.readline().strip()) != line:
            assert said, "the owner ended"

    @property
    def name(self) -> str:
        return next(self.run.glob("[0-9a-f]" * 8)).name

    def guards(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "guard" in child.cmdline()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run() -> Iterator[Path]:
    """Create a folder for services, with a short path, because sockets are created below it."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as made:
        Path(made).chmod(0o755)  # sandboxes run as another user, who must reach theirs
        yield Path(made) / "run"


@pytest.fixture
async def provider(run: Path, tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(ApptainerConfig(run_dir=run), tmp_path)
    yield provider
    await provider.close()


@pytest.fixture
def start_owner(run: Path, tmp_path: Path) -> Iterator[Callable[[str], Owner]]:
    started = []

    def start(mode: str = "stay") -> Owner:
        command = [sys.executable, "-c", OWNER, str(run), str(tmp_path), mode]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path.cwd(), start_new_session=True)
        started.append(process)
        owner = Owner(process, run)
        owner.until("begin")
        if mode == "stay":
            owner.until("ready")
        return owner

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def guards(run: Path) -> list[psutil.Process]:
    """Return the guards of this process's services in a run folder."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # zombies have no command line
            line = child.cmdline()
            if "guard" in line and any(word.startswith(f"{run}/") for word in line):
                found.append(child)
    return found


def services(run: Path) -> set[str]:
    """Return the folders of services."""
    return {path.name for path in run.iterdir()} if run.exists() else set()


def contents(run: Path) -> list[str]:
    """Return the contents of the folders of services."""
    return [path.name for folder in run.iterdir() for path in folder.iterdir()]


def traces(run: Path, name: str) -> list[str]:
    """Return what is left of a service on the host: processes, folders, mounts and control groups."""
    mounts = Path("/proc/self/mountinfo").read_text()
    prefixes = set(find_control_groups().paths_of(name).values())
    return [
        *(f"process {pid}" for pid in find_processes(lambda mark: mark.startswith(f"{name}-"))),
        *(f"group {path}" for prefix in prefixes for path in prefix.parent.glob(f"{prefix.name}-*")),
        *(f"folder {path}" for path in run.glob(f"{name}*")),
        *(["a mount"] if name in mounts else []),
    ]


async def gone(run: Path, name: str, seconds: float = ALLOWED_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while left := await anyio.to_thread.run_sync(traces, run, name):
        assert time.monotonic() < deadline, left
        await anyio.sleep(0.05)


async def test_kill_9_of_the_service_leaves_nothing_and_a_neighbor_does_not_notice(run, start_owner, provider):
    mine = await provider.start(SandboxSpec())
    owner = await anyio.to_thread.run_sync(start_owner)
    names = services(run) - {mine.id.split("-")[0]}
    assert len(names) == 1
    assert (await provider.sweep()).sandboxes == 0, "a live service was swept"
    name = names.pop()
    assert await anyio.to_thread.run_sync(traces, run, name)
    owner.kill()
    await gone(run, name)
    assert (await (await mine.bash()).run("echo up")).output == "up\n"


async def test_kill_9_of_the_process_group_spares_the_guard(run, start_owner):
    owner = await anyio.to_thread.run_sync(start_owner)
    name = owner.name
    os.killpg(owner.process.pid, signal.SIGKILL)
    owner.process.wait()
    await gone(run, name)


async def test_a_service_that_is_stopped_is_not_dead(run, start_owner, provider):
    owner = await anyio.to_thread.run_sync(start_owner)
    name = owner.name
    before = await anyio.to_thread.run_sync(traces, run, name)
    owner.process.send_signal(signal.SIGSTOP)
    assert (await provider.sweep()).sandboxes == 0
    assert await anyio.to_thread.run_sync(traces, run, name) == before
    owner.kill()
    await gone(run, name)


async def test_kill_9_of_service_and_guard_leaves_the_rest_to_the_next_start(run, start_owner, provider):
    owner = await anyio.to_thread.run_sync(start_owner)
    name = owner.name
    owner.process.send_signal(signal.SIGSTOP)
    for guard in owner.guards():
        guard.kill()
    owner.kill()
    deadline = time.monotonic() + ALLOWED_SECONDS
    while await anyio.to_thread.run_sync(find_processes, lambda mark: mark.startswith(f"{name}-")):
        assert time.monotonic() < deadline, "processes end without anybody's help"
        await anyio.sleep(0.05)
    report = await provider.sweep()
    assert (report.sandboxes, report.failures) == (2, ())
    await gone(run, name, 0)


async def test_a_guard_that_died_is_replaced_by_the_next_start(run, provider):
    first = await provider.start(SandboxSpec())
    (guard,) = guards(run)
    guard.kill()
    while guard.is_running() and guard.status() != psutil.STATUS_ZOMBIE:
        await anyio.sleep(0.01)
    second = await provider.start(SandboxSpec())
    assert second.id.split("-")[0] == first.id.split("-")[0]
    assert [one.pid for one in guards(run)] not in ([], [guard.pid])
    await provider.close()
    assert services(run) == set()


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
async def test_kill_9_while_sandboxes_start(run, start_owner, provider, delay):
    owner = await anyio.to_thread.run_sync(start_owner, "start")
    await anyio.sleep(delay)
    owner.process.send_signal(signal.SIGSTOP)
    names = services(run)
    # A sandbox's folder is created only once there is a guard. Until then, the next start's sweep removes the
    # service's folder.
    guarded = {name for name in names if any(path.name.isdigit() for path in (run / name).iterdir())}
    owner.kill()
    for name in guarded:
        await gone(run, name)
    await provider.sweep()
    for name in names:
        await gone(run, name)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
async def test_kill_9_while_sandboxes_close(run, start_owner, delay):
    owner = await anyio.to_thread.run_sync(start_owner, "close")
    await anyio.to_thread.run_sync(owner.until, "ready")
    name = owner.name
    owner.process.stdin.write("close\n")
    owner.process.stdin.flush()
    await anyio.sleep(delay)
    owner.kill()
    await gone(run, name)


@pytest.mark.parametrize("spares_guard", [True, False])
async def test_kill_9_of_a_service_whose_sandboxes_are_paused(run, start_owner, provider, spares_guard):
    owner = await anyio.to_thread.run_sync(start_owner, "paused")
    await anyio.to_thread.run_sync(owner.until, "ready")
    name = owner.name
    if not spares_guard:
        owner.process.send_signal(signal.SIGSTOP)
        for guard in owner.guards():
            guard.kill()
    owner.kill()
    if not spares_guard:
        assert (await provider.sweep()).failures == ()
    await gone(run, name)


@pytest.mark.parametrize("holds", ["bomb", "snapshot"])
async def test_kill_9_while_a_sandbox_is_full_of_forks_or_a_snapshot_is_held(run, start_owner, holds):
    owner = await anyio.to_thread.run_sync(start_owner, holds)
    await anyio.to_thread.run_sync(owner.until, "ready")
    name = owner.name
    owner.kill()
    await gone(run, name)


async def test_a_snapshot_is_freed_with_its_last_use(run, provider):
    first = await provider.start(SandboxSpec())
    service = run / first.id.split("-")[0]
    snapshot = await first.snapshot()
    others = [await provider.start(SandboxSpec(snapshot=snapshot)) for _ in range(2)]
    await snapshot.close()
    await others[0].close()
    assert (await others[1].exec(["true"])).exit_code == 0
    await others[1].close()
    assert list(service.glob("[0-9]*")) == []


async def test_a_provider_that_closes_removes_open_snapshots(run, provider):
    sandbox = await provider.start(SandboxSpec())
    name = sandbox.id.split("-")[0]
    snapshot = await sandbox.snapshot()
    await provider.close()
    assert await anyio.to_thread.run_sync(traces, run, name) == []
    await snapshot.close()


async def test_many_start_from_one_snapshot_at_once(provider):
    first = await provider.start(SandboxSpec())
    await first.exec(["bash", "-c", "mkdir many; for one in {1..500}; do echo $one >many/$one; done"])
    snapshot, counts = await first.snapshot(), []

    async def start() -> None:
        async with await provider.start(SandboxSpec(snapshot=snapshot)) as sandbox:
            counts.append((await sandbox.exec(["bash", "-c", "ls many | wc -l"])).stdout)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(start)
    await snapshot.close()
    assert counts == [b"500\n"] * 8


NEST = "import os; [(os.mkdir('one'), os.chdir('one')) for _ in range(2000)]"


async def test_a_sandbox_starts_from_a_snapshot_with_deeply_nested_folders(provider):
    first = await provider.start(SandboxSpec())
    for folder in ("/dev/shm", "/tmp"):
        assert (await first.exec(["python3", "-c", NEST], cwd=folder)).exit_code == 0
    snapshot = await first.snapshot()
    async with await provider.start(SandboxSpec(snapshot=snapshot)) as one:
        assert (await one.exec(["ls", "/dev/shm", "/tmp"])).stdout == b"/dev/shm:\n\n/tmp:\none\n"
    await snapshot.close()


async def test_a_start_from_a_snapshot_that_is_cancelled_leaves_nothing(run, provider):
    first = await provider.start(SandboxSpec())
    service = run / first.id.split("-")[0]
    snapshot = await first.snapshot()
    for milliseconds in (0, 5, 20, 60, 120):
        with anyio.move_on_after(milliseconds / 1000):
            await (await provider.start(SandboxSpec(snapshot=snapshot))).close()
    await snapshot.close()
    assert list(service.glob("[0-9]*")) == []


async def test_as_an_ordinary_user():
    """An ordinary user has no control groups and no right to inspect the processes in a sandbox."""
    chosen = "kill_9_of or full_of_forks or service_killed or snapshot"
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-k",
        chosen,
        __file__,
    ]
    with ordinary_user() as user:
        done = await anyio.to_thread.run_sync(lambda: user.run(pytest_, timeout=170))
        assert done.returncode == 0, done.stdout
        assert user.remaining_processes() == []


async def test_a_run_folder_removed_under_a_live_service(run, provider):
    first = await provider.start(SandboxSpec())
    bash = await first.bash()
    (run / first.id.split("-")[0]).rename(run / "elsewhere")
    second = await provider.start(SandboxSpec())
    assert second.id.split("-")[0] != first.id.split("-")[0]
    assert (await (await second.bash()).run("echo up")).output == "up\n"
    assert (await bash.run("echo up")).output == "up\n"
    await provider.close()
    for sandbox in (first, second):
        assert await anyio.to_thread.run_sync(traces, run, sandbox.id.split("-")[0]) == []


async def test_a_run_folder_removed_and_the_service_killed(run, start_owner):
    owner = await anyio.to_thread.run_sync(start_owner)
    name = owner.name
    (run / name).rename(run.parent / "elsewhere")
    owner.kill()
    await gone(run, name)


async def test_close_leaves_nothing(run, provider):
    sandbox = await provider.start(SandboxSpec())
    await (await sandbox.bash()).run("setsid sleep 1000 & disown; mkdir -p /a/b; touch /a/b/c; chmod 0 /a/b")
    await sandbox.python()
    assert provider.live()[0].id == sandbox.id
    await sandbox.close()
    await sandbox.close()
    assert await anyio.to_thread.run_sync(processes_of, {sandbox.id}) == []
    assert contents(run) == ["owner"]
    assert provider.live() == []
    await provider.close()
    await provider.close()
    assert services(run) == set()


async def test_a_cancelled_start_leaves_nothing(run, provider):
    for seconds in (0.0, 0.02, 0.1, 0.2, 0.3):
        with anyio.move_on_after(seconds):
            sandbox = await provider.start(SandboxSpec())
            await sandbox.close()
    assert contents(run) == ["owner"]
    assert provider.live() == []


async def test_a_provider_that_closes_while_sandboxes_start_leaves_nothing(run, tmp_path):
    for milliseconds in (0, 3, 10, 30, 100):
        provider = make_provider(ApptainerConfig(run_dir=run), tmp_path)
        name = (await provider.start(SandboxSpec())).id.split("-")[0]

        async def start(provider: SandboxProvider) -> None:
            with suppress(SandboxClosedError, SandboxStartError):
                await provider.start(SandboxSpec())

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(start, provider)
            await anyio.sleep(milliseconds / 1000)
            await provider.close()
        await gone(run, name)
        assert not [child for child in psutil.Process().children() if sandbox_of(child.pid) is not None]


async def test_a_start_that_fails_says_why_and_leaves_nothing(run, provider, tmp_path):
    bad = tmp_path / "bad.sif"
    bad.write_text("no image")
    with pytest.raises(Exception, match="image"):
        await provider.start(SandboxSpec(image=str(bad)))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SandboxStartError):
        await provider.start(SandboxSpec(image=str(empty)))
    assert contents(run) == ["owner"]
