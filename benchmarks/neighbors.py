"""Measure what an attack in one sandbox costs a neighbor and the service, in real Apptainer.

Run: python benchmarks/neighbors.py [--json FILE] [--quick | --smoke]

For each attack, rounds without and with it alternate. Each measures the round trip of `true` in a neighbor's shell, and
of a line through a socket that the service's event loop serves. A figure is the median over the rounds of the ratio of
a round's two medians; other load on the machine affects both sides. 1.1 means ten percent slower.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
from common import Figures, Options, report, run

from sandboxes import (
    ApptainerConfig,
    Sandbox,
    SandboxClosedError,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    make_provider,
)

MIB = 1024**2
LIMITS = {"max_processes": 128, "memory_bytes": 512 * MIB, "disk_bytes": 128 * MIB}
PAUSE = 0.003
"""The pause between two probes, since the neighbor is not busy itself."""
SETTLE = 0.7
"""The time from the start of an attack to the first probe, in which the watchdog looks once."""
ATTACK_SECONDS = 60.0
AIM = "<= 1.10"
ROUNDS = ((9, 1.5), (2, 0.4), (1, 0.1))
"""How many rounds of how many seconds, by the size of the benchmark."""

SHELL = {
    "spin": "for i in 1 2 3 4 5 6 7 8; do while :; do :; done & done; wait",
    "fork_bomb": "bomb() { bomb | bomb & }; bomb; sleep 1000",
    "memory_hog": "while :; do head -c 1G /dev/zero | tail >/dev/null; done",
    "yes": "yes",
    "full_disk": "while :; do dd if=/dev/zero of=/workspace/big bs=1M; rm -f /workspace/big; done 2>/dev/null",
    "kill_all": "kill -9 -1; kill -9 $$",
    "daemon": "for i in {1..50}; do setsid -f sleep 1000; done; yes | head -c 1000; sleep 0.05",
    "long_line": "head -c 1G /dev/zero | tr '\\0' x",
    "invalid_utf8": "while :; do printf '\\xff\\xfe\\xc3('; done",
    "escapes": "yes $'\\e[2J\\e]0;title\\a\\e[31m'",
}
ENDING = {"daemon", "long_line"}
"""The attacks that end by themselves; any other one has failed if it ends without an error."""
CELLS = {
    "kernel_exit": "import os; os._exit(1)",
    "kernel_flood": "while True: print('y' * 1000)",
}


@dataclass(slots=True)
class Times:
    """Round trips of one measurement, in seconds."""

    neighbor: list[float] = field(default_factory=list)
    service: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Probes:
    """The neighbor's shell, and a connection to the service's event loop."""

    sandbox: Sandbox
    stream: anyio.abc.SocketStream

    async def measure(self, seconds: float) -> Times:
        """Measure both round trips, one after the other, for `seconds`."""
        times, shell = Times(), await self.sandbox.bash()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begun = time.perf_counter()
            await shell.run("true")
            times.neighbor.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            await self.stream.send(b"GET / HTTP/1.1\r\n\r\n")
            await self.stream.receive()
            times.service.append(time.perf_counter() - begun)
            await anyio.sleep(PAUSE)
        return times


@asynccontextmanager
async def probes(provider: SandboxProvider) -> AsyncIterator[Probes]:
    """Start a neighbor, and a server in this event loop."""

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            async for _ in stream:
                await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with anyio.create_task_group() as tasks, await provider.start(SandboxSpec()) as sandbox:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            found = Probes(sandbox, stream)
            await found.measure(0.5)
            yield found
        tasks.cancel_scope.cancel()


def in_shell(command: str) -> Callable[[Sandbox], Awaitable[object]]:
    """Return an attack that runs a command in the sandbox's bash."""

    async def attack(sandbox: Sandbox) -> object:
        return await (await sandbox.bash()).run(command, timeout=ATTACK_SECONDS)

    return attack


def attacks() -> dict[str, Callable[[Sandbox], Awaitable[object]]]:
    """Return the attacks by name; each runs once per call."""

    def in_kernel(code: str) -> Callable[[Sandbox], Awaitable[object]]:
        async def attack(sandbox: Sandbox) -> object:
            return await (await sandbox.python()).execute(code, timeout=ATTACK_SECONDS)

        return attack

    return {name: in_shell(command) for name, command in SHELL.items()} | {
        name: in_kernel(code) for name, code in CELLS.items()
    }


class Attacker:
    """A sandbox that attacks, replaced by a new one when it has ended."""

    def __init__(self, provider: SandboxProvider, name: str, attack: Callable[[Sandbox], Awaitable[object]]) -> None:
        self._provider = provider
        self._name = name
        self._attack = attack
        self._sandbox: Sandbox | None = None

    async def start(self) -> Sandbox:
        """Return the sandbox with its shell open."""
        if self._sandbox is None:
            self._sandbox = await self._provider.start(SandboxSpec(**LIMITS))  # type: ignore[arg-type]
            await self._sandbox.bash()
        return self._sandbox

    @asynccontextmanager
    async def attacking(self) -> AsyncIterator[None]:
        """Attack over and over during the block.

        Raises:
            ExceptionGroup: The attack did not take place, so that figures would mean nothing.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._go_on)
            await anyio.sleep(SETTLE)
            yield
            tasks.cancel_scope.cancel()
        try:
            await (await self.start()).end_processes()
        except SandboxClosedError:
            await self.aclose()

    async def _go_on(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            try:
                ended = await self._attack(await self.start())
                if self._name not in ENDING:
                    raise RuntimeError(f"the attack {self._name} ended at once: {ended}")
            except SandboxClosedError:
                await self.aclose()
            except SandboxError:
                continue  # it ended its session, or reached a limit: try again

    async def aclose(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


async def main(given: Options) -> None:
    rounds, seconds = given.plan(*ROUNDS)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as state:
        provider = make_provider(ApptainerConfig(), Path(state))
        try:
            async with probes(provider) as found:
                for name, attack in attacks().items():
                    figures |= await ratios(provider, found, name, attack, rounds, seconds)
        finally:
            await provider.close()
    figures["worst_ratio"] = max(value for key, value in figures.items() if value and key.endswith("p50_ratio"))
    aims = {key: AIM for key in figures if key.endswith("ratio")}
    report("neighbors", given, {"rounds": rounds, "seconds": seconds}, figures, aims)


async def ratios(
    provider: SandboxProvider,
    found: Probes,
    name: str,
    attack: Callable[[Sandbox], Awaitable[object]],
    rounds: int,
    seconds: float,
) -> dict[str, float]:
    pairs: list[tuple[Times, Times]] = []
    async with aclosing(Attacker(provider, name, attack)) as attacker:
        for _ in range(rounds):
            await attacker.start()
            quiet = await found.measure(seconds)
            async with attacker.attacking():
                pairs.append((quiet, await found.measure(seconds)))
    figures = {}
    for side in ("neighbor", "service"):
        times = [(getattr(before, side), getattr(after, side)) for before, after in pairs]
        medians = [statistics.median(after) / statistics.median(before) for before, after in times]
        figures[f"{name}_{side}_p50_ratio"] = statistics.median(medians)
        slowest = [statistics.quantiles(after, n=100)[-1] for _, after in times]
        figures[f"{name}_{side}_p99_ms"] = 1000 * statistics.median(slowest)
    return figures


if __name__ == "__main__":
    run(main, __doc__ or "")
