"""Code that attacks its sandbox: the host, the service and the neighbours do not notice."""

import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandboxes import (
    ApptainerConfig,
    Bind,
    LimitExceededError,
    Sandbox,
    SandboxConfigError,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    SessionDiedError,
    make_provider,
)
from sandboxes.process import marked_processes

pytestmark = [pytest.mark.anyio, pytest.mark.apptainer]
MIB = 1024**2


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(ApptainerConfig(), tmp_path)
    yield provider
    await provider.close()


async def left_of(sandbox_id: str) -> list[int]:
    return await anyio.to_thread.run_sync(marked_processes, {sandbox_id})


async def works(sandbox: Sandbox) -> bool:
    return (await (await sandbox.bash()).run("echo up", timeout=30)).output == "up\n"


async def test_a_fork_bomb_stays_inside(provider: SandboxProvider) -> None:
    async with (
        await provider.start(SandboxSpec(max_processes=64)) as sandbox,
        await provider.start(SandboxSpec()) as neighbour,
    ):
        bash = await sandbox.bash()
        await bash.run("bomb() { bomb | bomb & }; bomb", timeout=3)
        assert await works(neighbour)
        await sandbox.end_processes()
        assert await works(sandbox)
        with anyio.fail_after(20):
            await bash.run("bomb() { bomb | bomb & }; bomb", timeout=2)
            await sandbox.close()
    assert await left_of(sandbox.id) == []


async def test_memory_is_limited_and_the_cause_is_told(provider: SandboxProvider) -> None:
    async with await provider.start(SandboxSpec(memory_bytes=256 * MIB)) as sandbox:
        python = await sandbox.python()
        if "memory" in provider.enforced:
            with pytest.raises(LimitExceededError) as error:
                await python.execute("x = bytearray(1 << 30)", timeout=60)
            assert error.value.limit == "memory"
        else:  # control groups are not ours here: each process alone is limited
            result = await python.execute("x = bytearray(1 << 30)", timeout=60)
            assert result.error is not None
            assert result.error.ename == "MemoryError"
        assert (await python.execute("1 + 1")).result == "2"
        result = await sandbox.exec(["bash", "-c", "head -c 1G /dev/zero | tail"], timeout=60)
        assert result.exit_code != 0
        assert await works(sandbox)


async def test_disk_is_limited(provider: SandboxProvider) -> None:
    async with await provider.start(SandboxSpec(disk_bytes=32 * MIB)) as sandbox:
        result = await sandbox.exec(["dd", "if=/dev/zero", "of=/workspace/big", "bs=1M", "count=100"])
        assert result.exit_code != 0
        await sandbox.exec(["rm", "-f", "/workspace/big"])
        await sandbox.write_file("small", "fits")


async def test_an_endless_line_does_not_grow_the_host(provider: SandboxProvider) -> None:
    async with await provider.start(SandboxSpec()) as sandbox:
        bash = await sandbox.bash()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await bash.run("head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo end", timeout=120)
        assert result.truncated
        assert result.output.endswith("end\n")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


async def test_floods_leave_the_event_loop_to_others(provider: SandboxProvider) -> None:
    async with (
        await provider.start(SandboxSpec()) as sandbox,
        await provider.start(SandboxSpec()) as neighbour,
    ):
        flooding, quiet = await sandbox.bash(), await neighbour.bash()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: flooding.run("yes", timeout=3))
            slowest = 0.0
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                begun = time.monotonic()
                await quiet.run("true")
                slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 1


async def test_killing_everything_inside_is_survived(provider: SandboxProvider) -> None:
    async with await provider.start(SandboxSpec()) as sandbox:
        bash, python = await sandbox.bash(), await sandbox.python()
        await python.execute("x = 1")
        with pytest.raises(SessionDiedError):
            await bash.run("kill -9 -1; kill -9 $$")
        assert await works(sandbox)
        with pytest.raises(SessionDiedError):
            await python.execute("x")
        assert (await python.execute("3 + 3")).result == "6"


async def test_planted_links_lead_nowhere(provider: SandboxProvider, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    async with await provider.start(SandboxSpec()) as sandbox:
        bash = await sandbox.bash()
        await bash.run(f"ln -s {secret} link; ln -s / rootlink; ln -s {tmp_path} dir")
        with pytest.raises(SandboxError):
            await sandbox.read_file("link")
        await sandbox.write_file(f"rootlink{tmp_path}/made", "inside")
        assert not (tmp_path / "made").exists()
        await sandbox.write_file("dir/planted", "inside")
        assert not (tmp_path / "planted").exists()


async def test_the_folder_of_pipes_shows_and_takes_nothing(provider: SandboxProvider) -> None:
    async with await provider.start(SandboxSpec()) as sandbox:
        bash = await sandbox.bash()
        result = await bash.run("ls /run/rollout/pipes; echo $?; touch /run/rollout/pipes/x; echo $?")
        assert result.output.count("denied") + result.output.count("Read-only") == 2, result
        result = await bash.run("chmod 777 /run/rollout/pipes")
        assert result.exit_code != 0
        assert (await bash.run("ls -l /proc/1/fd")).exit_code != 0


async def test_a_replaced_shell_and_tools_harm_only_their_sandbox(provider: SandboxProvider) -> None:
    async with await provider.start(SandboxSpec(memory_bytes=128 * MIB)) as sandbox:
        bash = await sandbox.bash()
        await bash.run("rm -f /bin/cat /bin/tar; printf '#!/bin/bash\\nyes' >/bin/stat; chmod +x /bin/stat")
        with pytest.raises(SandboxError):
            await sandbox.write_file("x", "y")
        with pytest.raises(SandboxError), anyio.fail_after(60):
            await sandbox.read_file("/etc/passwd")
        assert await works(sandbox)


async def test_binds_are_read_and_cannot_be_changed(provider: SandboxProvider, tmp_path: Path) -> None:
    shared = tmp_path / "shared"  # below folders that the sandbox's user cannot enter
    shared.mkdir()
    (shared / "data").write_text("given")
    spec = SandboxSpec(read_only_binds=[Bind(str(shared), "/data"), Bind(str(shared / "data"), "/one")])
    async with await provider.start(spec) as sandbox:
        assert await sandbox.read_file("/data/data") == b"given"
        assert await sandbox.read_file("/one") == b"given"
        for path in ("/data/data", "/data/new", "/one"):
            with pytest.raises(SandboxError):
                await sandbox.write_file(path, "changed")
    with pytest.raises(SandboxConfigError):
        await provider.start(SandboxSpec(read_only_binds=[Bind("/etc:/etc", "/x")]))
