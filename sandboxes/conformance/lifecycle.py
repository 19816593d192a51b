"""From start to close: cancelled starts, calls in progress, and nothing that runs after the close."""

from collections.abc import AsyncIterator, Awaitable

import anyio

from sandboxes.conformance.expectations import GRACE, expect, expect_error
from sandboxes.contract import Sandbox, SandboxProvider, SandboxSpec
from sandboxes.errors import SandboxClosedError, SandboxError


async def processes_end(sandbox: Sandbox, _: SandboxProvider) -> None:
    """`end_processes` ends every process, sessions included; files stay, and new sessions open."""
    bash = await sandbox.bash()
    await bash.run("X=1; for number in 1 2 3; do (sleep 2; touch survived) & done")
    await sandbox.end_processes()
    result = await bash.run('sleep 3; ls; echo "${X-gone}"')
    expect(result.output == "gone\n", result)


async def background_goes_on(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A program is over when it ends; what it left in the background goes on, also with its output open."""
    for _number in range(5):
        left = await sandbox.exec(["bash", "-c", "sleep 100 & echo $!"])
        alive = ["bash", "-c", f"kill -0 {left.stdout.decode()}"]
        expect((await sandbox.exec(alive)).exit_code == 0, left)
    with anyio.fail_after(GRACE):  # until then, a program that was forked has its parent's command line
        while (await sandbox.list_running()) not in ([], ["sleep 100"]):  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def closes(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """`close` ends calls in progress, may be called repeatedly and concurrently, and leaves the sandbox unusable."""
    bash = await sandbox.bash()
    failures: list[SandboxError] = []

    async def run() -> None:
        failures.append(await expect_error(SandboxError, bash.run("sleep 100")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await sandbox.exec(["true"])
        tasks.start_soon(sandbox.close)
        tasks.start_soon(sandbox.close)
    expect(len(failures) == 1, failures)
    await sandbox.close()
    await expect_error(SandboxClosedError, bash.run("true"))
    await expect_error(SandboxClosedError, sandbox.exec(["true"]))
    await expect_error(SandboxClosedError, sandbox.read_file("x"))
    await expect_error(SandboxClosedError, sandbox.bash())
    await expect_error(SandboxClosedError, sandbox.python())
    expect(sandbox.id not in {info.id for info in provider.live()}, provider.live())


async def closes_under_calls(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Every kind of call in progress when the sandbox closes ends soon, with a SandboxError."""
    bash, python = await sandbox.bash(), await sandbox.python()
    await sandbox.exec(["truncate", "-s", "1G", "large"])
    ended: list[str] = []

    async def under_way(name: str, call: Awaitable[object]) -> None:
        await expect_error(SandboxError, call)
        ended.append(name)

    async def slow() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await anyio.sleep(0.01)

    async def read() -> None:
        async for _ in sandbox.read_stream("large"):
            await anyio.sleep(0.05)

    calls: dict[str, Awaitable[object]] = {
        "bash": bash.run("sleep 100"),
        "python": python.execute("import time; time.sleep(100)"),
        "exec": sandbox.exec(["sleep", "100"]),
        "write": sandbox.write_stream("f", slow()),
        "read": read(),
    }
    with anyio.fail_after(GRACE + 1):
        async with anyio.create_task_group() as tasks:
            for name, call in calls.items():
                tasks.start_soon(under_way, name, call)
            await anyio.sleep(1)
            tasks.start_soon(sandbox.close)
    expect(sorted(ended) == sorted(calls), ended)


async def starts_cancelled(_: Sandbox, provider: SandboxProvider) -> None:
    """A start that is cancelled at any moment leaves no sandbox."""
    before = {info.id for info in provider.live()}
    for milliseconds in (0, 20, 60, 120, 200):
        with anyio.move_on_after(milliseconds / 1000) as scope:
            started = await provider.start(SandboxSpec(label="conformance"))
        if not scope.cancelled_caught:
            await started.close()
    expect({info.id for info in provider.live()} == before, provider.live())
