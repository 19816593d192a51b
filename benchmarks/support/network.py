"""Machines of a small network on this one: each with its own address, host name, process ids and mounts.

Guarantees: a machine ends with everything on it when its block is left, and also when this process ends in whatever
way, because the first process of a machine ends with its standard input. The network itself belongs to this process and
its children: `enter` gives it one of its own. An ordinary user gets a user namespace around it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from anyio.abc import Process

from sandboxes.host.children import start_process

SUBNET = "10.78.0"
HUB = f"{SUBNET}.254"
"""The address of this process in its network."""
START_SECONDS = 30.0
_BRIDGE = "hub"
_OUTSIDE = "BENCHMARK_OUTSIDE"
"""The variable with the network that this process was in before."""
# Arguments: the machine's name and address. The first process of the machine collects orphans while `cat` runs.
_FIRST = """
hostname "$0"
until ip link show eth0 >/dev/null 2>&1; do sleep 0.01; done
ip link set lo up && ip address add "$1/24" dev eth0 && ip link set eth0 up && echo ready
cat >/dev/null
"""


def enter() -> None:
    """Start this program again in a network of its own, unless it is in one; call it before anything else runs."""
    own = _namespace(os.getpid(), "net")
    if os.environ.get(_OUTSIDE, own) != own:
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    program = [sys.executable, *sys.orig_argv[1:]]
    os.execvpe("unshare", ["unshare", *user, "--net", "--", *program], os.environ | {_OUTSIDE: str(own)})


async def connect() -> None:
    """Make the network's bridge, with the address `HUB`."""
    for command in (
        ["link", "set", "lo", "up"],
        ["link", "add", _BRIDGE, "type", "bridge"],
        ["address", "add", f"{HUB}/24", "dev", _BRIDGE],
        ["link", "set", _BRIDGE, "up"],
    ):
        await _ip(*command)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine in the network."""

    name: str
    number: int
    first: psutil.Process
    """Its first process."""
    network: str
    """Its namespace of the network, which `pin` keeps from being used again under this name until it is closed."""
    pin: int
    keeper: Process
    """Started the first process; the machine ends with it."""

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command there; what is started is the child of the process that runs it."""
        enter = ["nsenter", "--target", str(self.first.pid), "--net", "--uts", "--mount", "--pid"]
        return [*enter, "--", *command]

    async def cut(self) -> None:
        """Let no packet through, either way, without telling anyone."""
        await _ip("link", "set", f"v{self.number}", "nomaster")

    async def heal(self) -> None:
        """Let packets through again."""
        await _ip("link", "set", f"v{self.number}", "master", _BRIDGE)

    async def lose(self) -> None:
        """End it with everything on it, as a power cut does."""
        if self.keeper.returncode is None:
            self.keeper.kill()
        await self.keeper.wait()
        await _ip("link", "delete", f"v{self.number}", check=False)  # it may be gone with the machine

    def processes(self) -> list[psutil.Process]:
        """Return the processes on it, except its first and those that `cat` stands for."""
        own = _namespace(self.first.pid, "pid")
        known = {self.first.pid, *(child.pid for child in self.first.children() if child.name() == "cat")}
        return [one for one in psutil.process_iter() if one.pid not in known and _namespace(one.pid, "pid") == own]

    def mounts(self) -> list[str]:
        """Return its table of mounts, line by line."""
        return Path(f"/proc/{self.first.pid}/mountinfo").read_text().splitlines()


@asynccontextmanager
async def machine(name: str, number: int) -> AsyncIterator[Machine]:
    """Run a machine for the block; its address ends in `number`, which no other may have."""
    apart = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["unshare", *apart, "--", "sh", "-c", _FIRST, name, f"{SUBNET}.{number}"]
    keeper = await start_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        with anyio.fail_after(START_SECONDS):
            while _namespace(keeper.pid, "net") == _namespace(os.getpid(), "net"):  # noqa: ASYNC110 - another process
                await anyio.sleep(0.01)
            link = f"v{number}"
            await _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
            await _ip("link", "set", link, "master", _BRIDGE, "up")
            if keeper.stdout is None or await keeper.stdout.receive() != b"ready\n":
                raise RuntimeError(f"the machine {name} does not start")
        first = psutil.Process(keeper.pid).children()[0]
        pin = os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        yield Machine(name, number, first, str(_namespace(first.pid, "net")), pin, keeper)
    finally:
        with anyio.CancelScope(shield=True):
            await keeper.aclose()


def namespaces() -> set[str]:
    """Return the namespaces of the network that some process is in."""
    found = {_namespace(one.pid, "net") for one in psutil.process_iter()}
    return {one for one in found if one is not None}


def _namespace(pid: int, kind: str) -> str | None:
    """Return the namespace of a process; None if the process has ended or is another user's."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return None


async def _ip(*arguments: str, check: bool = True) -> None:
    await anyio.run_process(["ip", *arguments], check=check)
