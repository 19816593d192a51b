"""No sandbox outlives its service: not after kill -9, not half started, and a sweep spares the living."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandboxes import ApptainerConfig, SandboxProvider, SandboxSpec, SandboxStartError, make_provider
from sandboxes.limits import find_groups
from sandboxes.process import marked_processes
from sandboxes.rundir import run_base

pytestmark = [pytest.mark.anyio, pytest.mark.apptainer]

OWNER = """
import sys, anyio
from pathlib import Path
from sandboxes import ApptainerConfig, SandboxSpec, make_provider

async def main():
    provider = make_provider(ApptainerConfig(), Path(sys.argv[1]))
    for _ in range(2):
        sandbox = await provider.start(SandboxSpec())
        await (await sandbox.bash()).run("setsid sleep 1000 & disown; nohup sleep 1000 & sleep 1000 &")
        print(sandbox.id, flush=True)
    print("ready", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(ApptainerConfig(), tmp_path)
    yield provider
    await provider.close()


def start_owner(state: Path) -> tuple[subprocess.Popen[str], set[str]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert owner.stdout is not None
    ids = set()
    while (line := owner.stdout.readline().strip()) != "ready":
        assert line, "the owner ended"
        ids.add(line)
    owner.stdout.close()
    return owner, ids


def traces(ids: set[str]) -> list[str]:
    """What is left of sandboxes on the host: processes, folders, mounts and control groups."""
    mounts = Path("/proc/self/mountinfo").read_text()
    groups = [path for one in ids for path in find_groups().paths_of(one).values() if path.exists()]
    folders = [run_base(None) / one for one in ids if (run_base(None) / one).exists()]
    return [
        *map(str, marked_processes(ids)),
        *map(str, groups),
        *map(str, folders),
        *(one for one in ids if one in mounts),
    ]


async def test_kill_9_of_the_service_ends_its_sandboxes_and_a_sweep_removes_the_rest(
    tmp_path: Path, provider: SandboxProvider
) -> None:
    owner, ids = await anyio.to_thread.run_sync(start_owner, tmp_path)
    assert await anyio.to_thread.run_sync(marked_processes, ids)
    mine = await provider.start(SandboxSpec())
    assert await provider.sweep() == type(await provider.sweep())(), "a live service was swept"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 5
    while await anyio.to_thread.run_sync(marked_processes, ids):
        assert time.monotonic() < deadline, "processes outlived their service by 5 s"
        await anyio.sleep(0.05)
    report = await provider.sweep()
    assert report.failures == ()
    assert report.sandboxes == 2
    assert await anyio.to_thread.run_sync(traces, ids) == []
    assert (await (await mine.bash()).run("echo up")).output == "up\n"


async def test_close_leaves_nothing(provider: SandboxProvider) -> None:
    sandbox = await provider.start(SandboxSpec())
    await (await sandbox.bash()).run("setsid sleep 1000 & disown; mkdir -p /a/b; touch /a/b/c; chmod 0 /a/b")
    await sandbox.python()
    assert provider.live()[0].id == sandbox.id
    await sandbox.close()
    assert await anyio.to_thread.run_sync(traces, {sandbox.id}) == []
    assert provider.live() == []


async def test_a_cancelled_start_leaves_nothing(provider: SandboxProvider, tmp_path: Path) -> None:
    for seconds in (0.02, 0.1, 0.2, 0.3):
        with anyio.move_on_after(seconds):
            sandbox = await provider.start(SandboxSpec())
            await sandbox.close()
    records = [path.stem for path in (tmp_path / "sandboxes").glob("*.json")]
    assert records == []
    assert provider.live() == []


async def test_a_start_that_fails_says_why_and_leaves_nothing(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.sif"
    bad.write_text("no image")
    with pytest.raises(Exception, match="image"):
        await provider.start(SandboxSpec(image=str(bad)))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SandboxStartError):
        await provider.start(SandboxSpec(image=str(empty)))
    assert list((tmp_path / "sandboxes").glob("*.json")) == []


async def test_a_reused_process_number_does_not_protect_a_record(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    sandbox = await provider.start(SandboxSpec())
    path = tmp_path / "sandboxes" / f"{sandbox.id}.json"
    record = json.loads(path.read_text())
    assert record["owner_pid"] == os.getpid()
    path.write_text(json.dumps({**record, "owner_start": record["owner_start"] - 1}))
    report = await provider.sweep()
    assert report.sandboxes == 1
    await sandbox.close()
    assert await anyio.to_thread.run_sync(traces, {sandbox.id}) == []


async def test_many_at_once(provider: SandboxProvider) -> None:
    found: dict[int, str] = {}

    async def one(number: int) -> None:
        async with await provider.start(SandboxSpec()) as sandbox:
            bash = await sandbox.bash()
            await bash.run(f"echo {number} >mine")
            found[number] = (await bash.run("cat mine; ls")).output

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(one, number)
    assert found == {number: f"{number}\nmine\n" for number in range(8)}
