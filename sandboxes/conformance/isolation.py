"""Isolation: the limits on what code inside can see, reach and do. Some of these checks attack; see `ATTACKS`."""

import asyncio
import os
import socket
import sys
import tempfile
from pathlib import Path

import anyio
from anyio.abc import SocketAttribute

from sandboxes.conformance.expectations import expect, expect_error
from sandboxes.contract import Sandbox, SandboxProvider, SandboxSpec
from sandboxes.errors import SessionDiedError


async def hidden_host(sandbox: Sandbox, _: SandboxProvider) -> None:
    """The host's files, processes and environment are hidden."""
    with tempfile.NamedTemporaryFile(prefix="rollout-secret-", dir="/tmp") as secret:
        result = await sandbox.exec(["cat", secret.name])
        expect(result.exit_code != 0, result)
    result = await sandbox.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'"])
    expect(Path(sys.executable).name.encode() not in result.stdout, result.stdout)
    result = await sandbox.exec(["env"])
    home = os.environ.get("HOME", "/nowhere").encode()
    expect(b"HOME=" + home not in result.stdout.split() or home == b"/root", result.stdout)


async def hidden_network(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Without a network there is no way out, not even to the host's loopback."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.listeners[0].extra(SocketAttribute.local_port)  # noqa: S610  no Django
        result = await sandbox.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"], timeout=10)
        expect(result.exit_code not in {0, None}, result)
    result = await sandbox.exec(["bash", "-c", "cat /proc/net/dev | tail -n +3 | cut -d: -f1"])
    expect(set(result.stdout.split()) <= {b"lo"}, result)


async def reachable_owner(_: Sandbox, provider: SandboxProvider) -> None:
    """Where a sandbox listens for its owner, programs inside reach the owner and nothing else of the host."""
    async with await provider.start(SandboxSpec(listens=True, label="conformance")) as sandbox:
        listener = sandbox.listener
        expect(listener is not None, "no socket for the owner")
        if listener is None:
            return
        say = 'exec 3<>"/dev/tcp/127.0.0.1/$1"; echo called >&3; cat <&3'
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_answer, listener)
            port = str(listener.getsockname()[1])
            result = await sandbox.exec(["bash", "-c", say, "-", port], timeout=10)
        expect(result.stdout == b"answered\n", result)
        if provider.isolates:
            await hidden_network(sandbox, provider)


async def _answer(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    with connection:
        connection.setblocking(False)
        expect(await loop.sock_recv(connection, 64) == b"called\n", "not what was sent")
        await loop.sock_sendall(connection, b"answered\n")


async def hidden_neighbors(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """Sandboxes see neither each other's files nor processes, and cannot end them."""
    async with await provider.start(SandboxSpec()) as other:
        mine = "/tmp/mine"  # noqa: S108  inside
        await sandbox.write_file(mine, b"x")
        await (await sandbox.bash()).run("sleep 4242 &")
        result = await other.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        expect(b"4242" not in result.stdout, result)
        expect((await other.exec(["cat", mine])).exit_code != 0, "another sandbox's file")
        await other.exec(["bash", "-c", "kill -9 -1"])
        expect((await (await sandbox.bash()).run("jobs")).output.count("4242") == 1, "another sandbox ended it")


async def control_out_of_reach(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Code inside cannot end or inspect the processes that run the sandbox, which survives killing all others."""
    bash = await sandbox.bash()
    await bash.run("kill -9 1; kill -STOP 1")
    result = await bash.run("ls /proc/1/fd; cat /proc/1/environ >/dev/null")
    expect(result.exit_code != 0, result)
    await expect_error(SessionDiedError, bash.run("kill -9 -1; kill -9 $$"))
    expect((await bash.run("echo up")).output == "up\n", "the sandbox did not survive")


async def no_rights(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Code has no right over the host: no capability in its user namespace, and no setting that it can write."""
    if await _root_of_its_own(sandbox):
        await _attempts_as_root(sandbox)
    else:
        found = await _status(sandbox)
        expect(int(found[b"CapEff"], 16) == 0 and int(found[b"CapBnd"], 16) >= 0, found)
        expect(found[b"NoNewPrivs"] == b"1", found)
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/dev/mem"):
        result = await sandbox.exec(["bash", "-c", '[[ -e $1 ]] && exec 3>>"$1"', "-", path])
        expect(result.exit_code != 0, (path, result))


async def _root_of_its_own(sandbox: Sandbox) -> bool:
    """Return whether code is root in a user namespace that maps 0 to another id.

    A host whose own root is remapped looks the same, and is as safe.
    """
    result = await sandbox.exec(["bash", "-c", "id -u; cat /proc/self/uid_map"])
    uid, *lines = result.stdout.decode().splitlines()
    if uid != "0":
        return False
    [outside] = [line.split()[1] for line in lines if line.split()[0] == "0"]
    expect(outside != "0", result)
    return True


async def _status(sandbox: Sandbox) -> dict[bytes, bytes]:
    result = await sandbox.exec(["grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/self/status"])
    return dict(line.split(b":\t") for line in result.stdout.splitlines())


async def _attempts_as_root(sandbox: Sandbox) -> None:
    """Try what only the host's root can do."""
    attempts = (
        "mknod disk b 8 0 && cat disk",
        "date -s 2000-01-01",
        "mount -t proc proc /mnt && echo x >/mnt/sysrq-trigger",
        "mount -o remount,rw /proc/sys && echo x >/proc/sys/kernel/core_pattern",
        "dmesg --clear",
    )
    for attempt in attempts:
        result = await sandbox.exec(["bash", "-c", attempt])
        expect(result.exit_code not in {0, None}, (attempt, result))


ATTACKS = frozenset({hidden_neighbors.__name__, control_out_of_reach.__name__, no_rights.__name__})
"""Checks that would harm the host of a provider that does not isolate: they signal every process they can, or
write to the kernel."""
