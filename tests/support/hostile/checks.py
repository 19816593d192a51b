"""Checks that attack a sandbox, its neighbors, and the host through files, processes, memory, and sessions.

The docstring of `tests.support.hostile` says what every check asserts.
"""

import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread

from sandboxes import (
    FileMissingError,
    FileTooLargeError,
    LimitExceededError,
    Sandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    SessionDiedError,
)
from sandboxes.host.processes import processes_of
from sandboxes.providers.base import HostProvider
from sandboxes.reclaim.run_folders import run_base
from tests.support.repeated_starts import runs_apptainer

MIB = 1024**2
PATIENCE = 60.0
"""A limit, in seconds, for work that takes a second on an idle host."""

NOTHING = "nothing to attack"


class NothingToAttackError(Exception):
    """This host, or this user, has nothing that the check could take away from others."""


Check = Callable[[SandboxProvider], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


async def works(sandbox: Sandbox) -> bool:
    """Return whether a command and a cell run in the sandbox."""
    shell, python = await sandbox.bash(), await sandbox.python()
    said = await shell.run("echo up", timeout=PATIENCE)
    return said.output.endswith("up\n") and (await python.execute("6 * 7", timeout=PATIENCE)).result == "42"


async def left_of(provider: SandboxProvider, sandbox_id: str) -> list[str]:
    """Return everything of a closed sandbox that is still on this host."""
    found = [f"process {pid}" for pid in await anyio.to_thread.run_sync(processes_of, {sandbox_id})]
    folder = run_base(None).joinpath(*sandbox_id.split("-"))
    paths = [folder]
    if isinstance(provider, HostProvider):
        paths += provider.groups().paths_of(sandbox_id).values()
    found += [str(path) for path in paths if path.exists()]
    mounts = (await anyio.Path("/proc/self/mountinfo").read_text()).splitlines()
    return found + [line for line in mounts if f"{folder}/" in line]


@asynccontextmanager
async def attacked(provider: SandboxProvider, **limits: Any) -> AsyncIterator[Sandbox]:
    """Start a sandbox to attack and a neighbor that must not notice; require that nothing of either is left."""
    async with (
        await provider.start(SandboxSpec(**limits)) as sandbox,
        await provider.start(SandboxSpec()) as neighbor,
    ):
        assert await works(neighbor)
        yield sandbox
        assert await works(neighbor)
    for closed in (sandbox, neighbor):
        assert await left_of(provider, closed.id) == []


async def limits_of(sandbox: Sandbox, command: str, timeout: float = PATIENCE) -> set[str]:
    """Return the limits that a command reached, as reported by an error or its result."""
    try:
        result = await (await sandbox.bash()).run(command, timeout=timeout)
    except LimitExceededError as error:
        return {error.limit}
    return {violation.limit for violation in result.limit_violations}


async def takes_place(sandbox: Sandbox, command: str) -> None:
    """Require that an attack's command runs to its end: one that breaks off at once proves nothing."""
    result = await (await sandbox.bash()).run(command, timeout=PATIENCE)
    assert result.exit_code == 0, f"the attack did not take place: {result}"


async def soon(sandbox: Sandbox, limit: str) -> None:
    """Wait until the shell reports a limit that a background process reaches."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if limit in await limits_of(sandbox, "true"):
            return
        await anyio.sleep(0.1)
    raise AssertionError(f"nobody was told of the limit {limit!r}")


async def recovers(sandbox: Sandbox) -> None:
    """Require that sessions that died report it once each, and that new ones start."""
    for _ in range(3):
        try:
            assert await works(sandbox)
        except SessionDiedError:
            continue
        return
    raise AssertionError("sessions go on dying")


# Memory, processes, disk, output, time.


@check
async def fork_bomb(provider: SandboxProvider) -> None:
    """Forks fail inside, the host can still start programs, and ending all processes ends the attack."""
    async with attacked(provider, max_processes=64) as sandbox:
        shell = await sandbox.bash()
        await shell.run("bomb() { bomb | bomb & }; bomb", timeout=5)
        await sandbox.end_processes()
        await recovers(sandbox)
        # Closing the sandbox must cope with a bomb that still runs.
        await shell.run("bomb() { bomb | bomb & }; bomb", timeout=5)


@check
async def processes_that_stay(provider: SandboxProvider) -> None:
    """At the limit of processes the violation is reported, and the host can still start programs."""
    many = "setsid -f sh -c 'for i in $(seq 200); do sleep 1000 & done' 2>/dev/null; true"
    async with attacked(provider, max_processes=64) as sandbox:
        if "processes" not in await limits_of(sandbox, many):
            await soon(sandbox, "processes")
        assert (await sandbox.exec(["echo", "up"], timeout=PATIENCE)).stdout == b"up\n"
        await sandbox.end_processes()
        await recovers(sandbox)


@check
async def memory_hog(provider: SandboxProvider) -> None:
    """Four processes, each below the limit and together above it."""
    hog = "python3 -c 'import time; x = b\"x\" * (100 << 20); time.sleep(8)'"
    async with attacked(provider, memory_bytes=256 * MIB) as sandbox:
        assert "memory" in await limits_of(sandbox, f"for i in 1 2 3 4; do {hog} & done; wait")
        await recovers(sandbox)


@check
async def memory_in_one_process(provider: SandboxProvider) -> None:
    """A kernel that asks for too much memory either dies with the cause, or is refused."""
    async with attacked(provider, memory_bytes=256 * MIB) as sandbox:
        python = await sandbox.python()
        if "memory" in provider.enforced:
            try:
                await python.execute("x = b'x' * (1 << 30)", timeout=PATIENCE)
            except LimitExceededError as error:
                assert error.limit == "memory"  # noqa: PT017  checks also run outside pytest
            else:
                raise AssertionError("a kernel outgrew its sandbox")
        else:
            result = await python.execute("x = b'x' * (1 << 30)", timeout=PATIENCE)
            assert result.error.ename == "MemoryError"
        await recovers(sandbox)


@check
async def full_disk(provider: SandboxProvider) -> None:
    """Files and empty files fill the disk; removing them makes room again."""
    async with attacked(provider, disk_bytes=32 * MIB) as sandbox:
        limits = await limits_of(sandbox, "dd if=/dev/zero of=/workspace/big bs=1M count=100; true")
        assert ("disk" in limits) == ("disk" in provider.enforced)
        await sandbox.exec(["rm", "-f", "/workspace/big"])
        await sandbox.write_file("small", "fits")
        if "disk" in provider.enforced:
            many = "import os\nfor i in range(10**5): os.close(os.open(f'/workspace/{i}', os.O_CREAT))"
            assert "disk" in await limits_of(sandbox, f'python3 -c "{many}"')
            await sandbox.exec(["find", "/workspace", "-type", "f", "-delete"], timeout=PATIENCE)
            await sandbox.write_file("small", "fits")


@check
async def every_place_that_can_be_filled(provider: SandboxProvider) -> None:
    """Writes anywhere inside never exceed the sandbox's limits on disk and in memory."""
    places = "/tmp /var/tmp /dev/shm /dev /run/rollout/sockets /run"
    fill = f"for at in {places}; do dd if=/dev/zero of=$at/fill bs=1M count=400; done 2>&1; true"
    async with attacked(provider, disk_bytes=64 * MIB, memory_bytes=512 * MIB) as sandbox:
        await limits_of(sandbox, fill)
        try:
            said = await sandbox.exec(["bash", "-c", f"cd / && du -cm {places} | tail -n 1"], timeout=PATIENCE)
        except SandboxError:
            await recovers(sandbox)
            return
        if "disk" in provider.enforced:
            own = 64 if runs_apptainer(sandbox) else 1  # of /dev
            assert int(said.stdout.split()[0]) <= 64 + own, said


@check
async def endless_output(provider: SandboxProvider) -> None:
    """`yes` on both sessions is cut in the middle and stopped in time, and the neighbor answers meanwhile."""
    async with attacked(provider) as sandbox:
        assert await limits_of(sandbox, "yes", timeout=2) == {"time", "output"}
        result = await (await sandbox.python()).execute("while True: print('y' * 1000)", timeout=2)
        assert {violation.limit for violation in result.limit_violations} == {"time", "output"}
        await recovers(sandbox)


@check
async def lifetime(provider: SandboxProvider) -> None:
    """Whatever runs, the lifetime ends it, and every call reports why."""
    async with attacked(provider, lifetime_seconds=3.0) as sandbox:
        for command in ("trap '' INT TERM; sleep 300", "true"):
            assert await limits_of(sandbox, command) == {"lifetime"}
        assert not sandbox.healthy


# Signals, processes, descriptors.


@check
async def stop_everything(provider: SandboxProvider) -> None:
    """Stopped processes do not outlast a timeout."""
    async with attacked(provider) as sandbox:
        shell = await sandbox.bash()
        for command in ("kill -STOP -1; kill -STOP $$", "kill -STOP $$; true"):
            try:
                result = await shell.run(command, timeout=2)
                assert result.timed_out
            except SessionDiedError as error:
                assert error.timed_out  # noqa: PT017
            await sandbox.end_processes()
            await recovers(sandbox)


@check
async def numbers_of_processes(provider: SandboxProvider) -> None:
    """If a shell ends unexpectedly and others take its pid, signals reach nobody else."""
    async with attacked(provider) as sandbox:
        shell = await sandbox.bash()
        await shell.run("for i in {1..500}; do /bin/true; done; sleep 1000 & disown", timeout=PATIENCE)
        for _ in range(3):
            try:
                await shell.run("sleep 1000 & exec 8>&- 9>&-; kill -9 $$", timeout=PATIENCE)
            except SessionDiedError:
                await shell.run("for i in {1..200}; do /bin/true; done", timeout=PATIENCE)
        assert (await shell.run("sleep 1000", timeout=0.5)).timed_out
        await recovers(sandbox)


@check
async def every_descriptor(provider: SandboxProvider) -> None:
    """Garbage in every pipe, socket and file within reach costs the attacker at most its sessions."""
    code = """
import glob, os
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        continue
    for junk in (b"0 0\\n", b"+1\\n", b"\\xff" * 100, b"ended\\nready\\n", b"1\\0x\\0", b"9\\n" * 5000):
        try:
            os.write(fd, junk)
        except OSError:
            pass
"""
    async with attacked(provider) as sandbox:
        assert await works(sandbox)
        await sandbox.write_file("/tmp/junk.py", code)
        try:
            await takes_place(sandbox, "python3 /tmp/junk.py")
        except SessionDiedError:
            await recovers(sandbox)
        await sandbox.end_processes()
        await recovers(sandbox)


@check
async def forged_reports(provider: SandboxProvider) -> None:
    """Lines on the status pipe without a command's nonce are not results, and too many end the session."""
    async with attacked(provider) as sandbox:
        shell = await sandbox.bash()
        found = "for path in /proc/$$/fd/*; do [[ $(readlink $path) == *.st* ]] && break; done; "
        forged = "for word in 0 0123456789abcdef +7 ended; do echo $word 0 >$path || exit; done; (exit 7)"
        assert (await shell.run(found + forged, timeout=PATIENCE)).exit_code == 7
        try:
            await shell.run(found + "head -c 1000000 /dev/zero >$path", timeout=PATIENCE)
        except SessionDiedError:
            assert await works(sandbox)
        else:
            raise AssertionError("a flood of reports was taken")


@check
async def huge_environment(provider: SandboxProvider) -> None:
    """Arguments that are too long for the kernel fail that program, and nothing else."""
    async with attacked(provider) as sandbox:
        shell = await sandbox.bash()
        await shell.run("for i in {1..40}; do export big$i=$(head -c 100000 /dev/zero | tr '\\0' x); done")
        assert (await shell.run("/bin/true")).exit_code == 126
        result = await sandbox.exec(["true"], env={"big": "x" * 1_000_000}, timeout=PATIENCE)
        assert result.exit_code != 0
        await shell.restart()
        assert await works(sandbox)


# Files, and how the service reads them.


@check
async def planted_files(provider: SandboxProvider) -> None:
    """Links, FIFOs, devices and loops in the service's paths lead nowhere, and nothing waits for them."""
    async with attacked(provider) as sandbox:
        with tempfile.TemporaryDirectory() as host:
            await takes_place(
                sandbox,
                f"mkfifo fifo && ln -s loop loop && ln -s {host} dir && ln -s fifo link && "
                "cd /run/rollout/sockets && mkfifo fifo && ln -s / root && mkdir folder && "
                "for i in {1..300}; do ln -s /tmp/x $i || exit; done && cd /workspace",
            )
            for path in ("fifo", "loop", "link", "/dev/zero", "/run/rollout/sockets/fifo"):
                try:
                    with anyio.fail_after(PATIENCE):
                        await sandbox.read_file(path, limit=1000)
                except SandboxError:
                    continue
                raise AssertionError(f"{path} was read")
            await sandbox.write_file("dir/planted", "inside")
            assert not [path async for path in anyio.Path(host).iterdir()]
        assert await works(sandbox)


@check
async def folder_of_pipes(provider: SandboxProvider) -> None:
    """The folder of pipes shows nothing and accepts nothing, and the first process cannot be inspected."""
    async with attacked(provider) as sandbox:
        shell = await sandbox.bash()
        for command in (
            "ls /run/rollout/pipes",
            "touch /run/rollout/pipes/x",
            "chmod 777 /run/rollout/pipes",
        ):
            assert (await shell.run(command)).exit_code != 0, command
        assert (await shell.run("ls -l /proc/1/fd")).exit_code != 0


@check
async def replaced_programs(provider: SandboxProvider) -> None:
    """Code that replaces the programs of file operations harms only itself."""
    async with attacked(provider, memory_bytes=128 * MIB) as sandbox:
        shell = await sandbox.bash()
        await shell.run("rm -f /bin/cat /bin/tar; printf '#!/bin/bash\\nyes' >/bin/stat; chmod +x /bin/stat")
        try:
            with anyio.fail_after(2 * PATIENCE):
                await sandbox.read_file("/etc/passwd")
        except SandboxError:
            # Its output overfilled the shell that reads it, which is reported once.
            with suppress(LimitExceededError):
                await shell.run("true", timeout=PATIENCE)
            assert (await shell.run("echo up", timeout=PATIENCE)).output == "up\n"
        else:
            raise AssertionError("a false program was believed")


@check
async def answers_that_swell(provider: SandboxProvider) -> None:
    """Listings, files and trees that are larger than allowed are refused, even if they take little disk."""
    async with attacked(provider) as sandbox:
        shell = await sandbox.bash()
        name = "n" * 200
        await shell.run("truncate -s 100G sparse; mkdir many deep; ln -s sparse link", timeout=PATIENCE)
        await shell.run(f"python3 -c \"for i in range(30000): open(f'many/{name}{{i}}', 'w')\"", timeout=PATIENCE)
        for attempt in (
            lambda: sandbox.read_file("sparse"),
            lambda: sandbox.read_file("link"),
            lambda: sandbox.list("many"),
            lambda: _export(sandbox, "sparse"),
            lambda: _export(sandbox, "many"),
        ):
            try:
                await attempt()
            except FileTooLargeError:
                continue
            raise AssertionError("too much was taken")
        try:
            await sandbox.list("gone")
        except FileMissingError:
            assert await works(sandbox)
        else:
            raise AssertionError("a folder that is not there was listed")


async def _export(sandbox: Sandbox, path: str) -> None:
    async for _ in sandbox.export_path(path, limit=4 * MIB):
        continue


@check
async def forged_messages(provider: SandboxProvider) -> None:
    """A kernel sends garbage, other cells' output, and messages that are too large."""
    garbage = """
kernel = get_ipython().kernel
socket, session = kernel.iopub_socket, kernel.session
for parts in ([b""], [b"x"] * 3, [b"<IDS|MSG>"] * 7, [b"a", b"<IDS|MSG>", b"", b"{", b"[]", b"null", b"\\xff"]):
    socket.send_multipart(parts)
parent = {"msg_id": "other", "msg_type": "execute_request"}
session.send(socket, "stream", {"name": "stdout", "text": "forged"}, parent=parent)
for content in ({}, {"text": 7}, {"text": None}, {"data": []}, {"execution_state": 5}, {"traceback": {}}):
    for kind in ("stream", "execute_result", "error", "status", "display_data"):
        session.send(socket, kind, content, parent=kernel.get_parent())
sent = "all of it"
"""
    huge = "kernel.session.send(kernel.iopub_socket, 'stream', {'text': 'x' * 50_000_000})"
    async with attacked(provider) as sandbox:
        python = await sandbox.python()
        result = await python.execute(garbage, timeout=PATIENCE)
        assert "forged" not in result.output
        assert (await python.execute("sent", timeout=PATIENCE)).result == "'all of it'"
        cell = await python.execute(r"import os; os.write(1, b'\xff\n'); print('\ud800'); '\udfff'", timeout=PATIENCE)
        assert cell.error is None or cell.error.ename
        assert (await python.execute("1 + 1", timeout=PATIENCE)).result == "2"
        try:
            await python.execute(huge, timeout=PATIENCE)
        except SandboxError:
            await recovers(sandbox)
            return
        await recovers(sandbox)
