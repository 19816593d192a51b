"""Pauses: nothing inside runs, nothing is lost, and any use lets everything go on."""

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace

import anyio

from sandboxes.conformance.expectations import GRACE, expect, expect_error
from sandboxes.contract import Sandbox, SandboxProvider
from sandboxes.errors import LimitExceededError, SandboxClosedError, SandboxConfigError

PAUSE_SECONDS = 1.0
CLOSE_SECONDS = 5.0
BEATS = "(while :; do echo $EPOCHREALTIME; sleep 0.02; done >beats 2>/dev/null &)"
HOGS = "for number in 1 2 3; do (while :; do :; done &); done >/dev/null 2>&1"
DATA = "import hashlib, os; data = os.urandom(20_000_000); hashlib.md5(data).hexdigest()"


async def _is_possible(sandbox: Sandbox, provider: SandboxProvider) -> bool:
    """Return whether pauses work; if not, see that they are refused, and that the sandbox goes on."""
    if provider.pausing != "none":
        return True
    await expect_error(SandboxConfigError, sandbox.pause())
    expect(await sandbox.reclaim() == 0, "it gives back memory")
    expect((await sandbox.exec(["true"])).exit_code == 0, "the sandbox has ended")
    return False


async def _pause(sandbox: Sandbox, provider: SandboxProvider) -> None:
    expect(await sandbox.pause(), "it is not paused")
    expect(_state(sandbox, provider) == "paused", provider.live())


def _state(sandbox: Sandbox, provider: SandboxProvider) -> str | None:
    return next((info.state for info in provider.live() if info.id == sandbox.id), None)


async def _beats(sandbox: Sandbox) -> list[float]:
    return [float(line) for line in (await sandbox.read_file("beats")).split()]


async def pause_stops_processes(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """No process of a paused sandbox runs, not even in the background; after its next use all of them do."""
    await sandbox.exec(["bash", "-c", BEATS])
    with anyio.fail_after(GRACE):
        while not await _beats(sandbox):  # noqa: ASYNC110  they are in the sandbox
            await anyio.sleep(0.05)
    await _pause(sandbox, provider)
    begun = time.time()
    await anyio.sleep(PAUSE_SECONDS)
    ended = time.time()
    found = await _beats(sandbox)
    expect(not [beat for beat in found if begun < beat < ended], found)
    with anyio.fail_after(GRACE):
        while (await _beats(sandbox))[-1] < ended:  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def pause_keeps_state(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Sessions, files and background processes survive a pause, whether their memory is given back or not."""
    bash, python = await sandbox.bash(), await sandbox.python()
    await bash.run("mkdir -p inner; cd inner; NAME=kept; sleep 100 & echo file >file")
    digest = (await python.execute(DATA)).result
    expect(await sandbox.reclaim() == 0, "a sandbox that runs gives back memory")
    for _ in range(3):
        await _pause(sandbox, provider)
        expect(await sandbox.responds(1) and sandbox.healthy, "it does not respond")
        expect(await sandbox.list_running() == ["sleep 100"], await sandbox.list_running())
        await sandbox.reclaim()
        expect(_state(sandbox, provider) == "paused", "it runs")
        found = await bash.run("basename $PWD; echo $NAME; cat file; kill -0 %1 && echo alive")
        expect(found.output == "inner\nkept\nfile\nalive\n", found)
        expect((await python.execute("hashlib.md5(data).hexdigest()")).result == digest, "other data")


async def any_use_resumes(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Every call lets a paused sandbox go on first, and works."""
    bash, python = await sandbox.bash(), await sandbox.python()

    async def read_stream() -> None:
        async with aclosing(sandbox.read_stream("file")) as parts:
            expect(b"".join([part async for part in parts]) == b"text", "other contents")

    async def program() -> None:
        async with sandbox.program(["cat"]) as running:
            expect(await running.send(b"said") and await running.receive() == b"said", "other words")

    async def copy() -> None:
        await sandbox.import_path("copy", sandbox.export_path(sandbox.workdir))

    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: sandbox.write_file("file", "txt"),
        lambda: sandbox.edit_file("file", "txt", "text"),
        lambda: sandbox.read_file("file"),
        read_stream,
        lambda: sandbox.list("."),
        lambda: sandbox.exec(["true"]),
        program,
        lambda: bash.run("true"),
        lambda: python.execute("1"),
        bash.restart,
        python.restart,
        copy,
        sandbox.end_processes,
        sandbox.python,
    ]
    for number, call in enumerate(calls):
        await _pause(sandbox, provider)
        with anyio.fail_after(GRACE):
            await call()
        expect(_state(sandbox, provider) == "in_use", number)
    if await provider.takes_snapshots(sandbox.spec):
        await _pause(sandbox, provider)
        await (await sandbox.snapshot()).close()


async def calls_are_not_paused(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A sandbox is not paused while a call or a program is under way, whichever of them began first."""
    bash = await sandbox.bash()
    async with sandbox.program(["cat"]):
        expect(not await sandbox.pause(), "it was paused under a program")
    for number in range(30):
        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(number % 5 / 1000):
                tasks.start_soon(sandbox.pause)
                await sandbox.pause()
            tasks.start_soon(sandbox.pause)
            with anyio.fail_after(GRACE):
                result = await bash.run(f"sleep 0.01; echo {number}")
        expect(result.output == f"{number}\n", result)
    await _pause(sandbox, provider)
    expect((await bash.run("echo end")).output == "end\n", "it does not go on")


async def _pause_or_end(sandbox: Sandbox) -> None:
    with suppress(SandboxClosedError):
        await sandbox.pause()


async def _reclaim(sandbox: Sandbox) -> None:
    await sandbox.reclaim()


async def paused_closes(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A paused sandbox closes as promptly as any, also while it is being paused, or its memory is given back."""
    for meanwhile in (_pause_or_end, _reclaim):
        other = await provider.start(sandbox.spec)
        await other.exec(["bash", "-c", HOGS])
        await _pause(other, provider)
        with anyio.move_on_after(CLOSE_SECONDS) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(meanwhile, other)
                tasks.start_soon(other.close)
                tasks.start_soon(other.close)
        expect(not scope.cancelled_caught, "it does not close in time")
        expect(_state(other, provider) is None, provider.live())
        await expect_error(SandboxClosedError, other.pause())
        await expect_error(SandboxClosedError, other.exec(["true"]))


async def pause_keeps_limits(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """The limits of a sandbox hold after a pause, and its lifetime ends during one."""
    async with await provider.start(replace(sandbox.spec, lifetime_seconds=1.0)) as brief:
        await _pause(brief, provider)
        await anyio.sleep(1.5)
        expect((await expect_error(LimitExceededError, brief.exec(["true"]))) is not None, "it lives")
    if "memory" in provider.enforced:
        async with await provider.start(replace(sandbox.spec, memory_bytes=256 << 20)) as small:
            python = await small.python()
            await _pause(small, provider)
            await small.reclaim()
            await expect_error(LimitExceededError, python.execute("x = b'x' * (1 << 30)"))
