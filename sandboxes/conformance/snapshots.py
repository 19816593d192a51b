"""Snapshots: what a sandbox leaves is what others start from, and these are sandboxes like any other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from sandboxes.conformance.expectations import LOOK, expect, expect_error, expect_walls, said, walls, write_files
from sandboxes.contract import Sandbox, SandboxProvider, SandboxSpec, Snapshot
from sandboxes.errors import SandboxClosedError, SandboxConfigError

CHANGE = "echo changed >kept/file; rm kept/link; mv kept moved; ls -d kept moved 2>/dev/null"


async def _is_possible(sandbox: Sandbox, provider: SandboxProvider) -> bool:
    """Return whether snapshots can be taken; if not, see that it is refused, and that the sandbox goes on."""
    if await provider.takes_snapshots(sandbox.spec):
        return True
    await expect_error(SandboxConfigError, sandbox.snapshot())
    expect((await sandbox.exec(["true"])).exit_code == 0, "the sandbox has ended")
    return False


@asynccontextmanager
async def _snapshot(sandbox: Sandbox) -> AsyncIterator[Snapshot]:
    snapshot = await sandbox.snapshot()
    try:
        yield snapshot
    finally:
        with anyio.CancelScope(shield=True):
            await snapshot.close()


def _from(snapshot: Snapshot, sandbox: Sandbox) -> SandboxSpec:
    return replace(sandbox.spec, snapshot=snapshot)


async def snapshot_has_files(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A snapshot ends its sandbox; others start from its files, with modes, links and times, and without processes."""
    removed = await write_files(sandbox, provider)
    await said(sandbox, "(sleep 100 >/dev/null 2>&1 &)")
    look = f"{LOOK}ls -d {removed} 2>&1 | wc -l\n"
    before = await said(sandbox, look)
    if provider.isolates:
        await said(sandbox, "echo volatile >/dev/shm/volatile")
        look += "ls /dev/shm"
    async with _snapshot(sandbox) as snapshot:
        await expect_error(SandboxClosedError, sandbox.exec(["true"]))
        expect(snapshot.size_bytes > 0, snapshot.size_bytes)
        async with await provider.start(_from(snapshot, sandbox)) as other:
            found = await said(other, look)
            expect(found == before and "first\na\0b1\n" in found, (before, found))
            expect(await other.list_running() == [], await other.list_running())


async def snapshot_is_shared(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """No other sandbox that starts from the same snapshot, then or later, sees the changes of one."""
    await write_files(sandbox, provider)
    async with _snapshot(sandbox) as snapshot:
        async with (
            await provider.start(_from(snapshot, sandbox)) as first,
            await provider.start(_from(snapshot, sandbox)) as second,
        ):
            expect(await said(first, CHANGE) == "moved\n", "the files cannot be changed")
            expect(await said(second, "cat kept/file kept/link") == "first\nfirst\n", await said(second, "ls"))
        async with await provider.start(_from(snapshot, sandbox)) as third:
            expect(await said(third, "cat kept/file kept/link") == "first\nfirst\n", "changed")


async def snapshot_of_snapshot(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A sandbox that started from a snapshot can become one, which outlives the first; removed files stay away."""
    removed = await write_files(sandbox, provider)
    async with _snapshot(sandbox) as snapshot:
        second = await provider.start(_from(snapshot, sandbox))
        expect(await said(second, f"{CHANGE}; ls -d {removed} 2>&1 | wc -l") == "moved\n1\n", removed)
        async with _snapshot(second) as later:
            await snapshot.close()
            async with await provider.start(_from(later, sandbox)) as third:
                script = f"cat moved/file; stat -c %Y moved/old; ls -d kept moved/link {removed} 2>/dev/null"
                found = await said(third, script)
                expect(found == "changed\n1000000000\n", found)


async def snapshot_closes(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """No sandbox starts from a closed snapshot; one that did keeps its files. Closing is idempotent."""
    await write_files(sandbox, provider)
    async with _snapshot(sandbox) as snapshot, await provider.start(_from(snapshot, sandbox)) as other:
        await snapshot.close()
        await snapshot.close()
        await expect_error(SandboxClosedError, provider.start(_from(snapshot, sandbox)))
        expect(await said(other, "cat kept/hard") == "first\n", await said(other, "ls -R"))
        await other.end_processes()
        found = await said(other, "echo more >>kept/file; cat kept/file")
        expect(found == "first\nmore\n", found)


async def snapshot_is_walled(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A sandbox that started from a snapshot has the rights, limits, mounts and network of any other."""
    plain = await walls(sandbox, provider)
    async with _snapshot(sandbox) as snapshot, await provider.start(_from(snapshot, sandbox)) as other:
        await expect_walls(other, provider, plain)
