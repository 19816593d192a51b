"""The measurements of benchmarks/sandboxes.py, whose docstring explains each figure."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
from common import Figures, Options, percentile, report
from support.accounting import Account, Memory, account, host_cpu_seconds, read_memory
from support.bare_sandbox import bare_apptainer, bare_bash, bare_kernels
from support.sandbox_peers import PEERS, peer_figures

from sandboxes import ApptainerConfig, WarmPoolConfig, make_provider
from sandboxes.contract import Sandbox, SandboxProvider, SandboxSpec, SessionName
from sandboxes.host.facts import find_apptainer
from sandboxes.images.store import ImageStore
from sandboxes.scheduling.warm_pool import WarmPool
from sandboxes.sessions.serial_session import open_sessions

COMMAND, CELL = "echo hello", "1 + 1"
BOTH: tuple[SessionName, ...] = ("bash", "python")
SPEC = SandboxSpec()
STARTERS = 8
AIMS = {
    "bash_p50_ms": "<= 0.5",
    "bash_p99_ms": "<= 5",
    "python_p50_ms": "<= 5",
    "bash_speedup_vs_swerex": ">= 100",
    "parallel_sleep_s": "<= 1.3",
    "cold_start_p50_s": "<= 1",
    "warm_acquire_p50_ms": "<= 20",
    "cpu_s_per_sandbox_python": "<= 0.5",
    "cpu_s_per_sandbox_bash": "<= 0.2",
    "mb_per_sandbox_python": "<= 70",
    "mb_per_sandbox_bash": "<= 20",
}


@dataclass(frozen=True, slots=True)
class Plan:
    calls: int
    """Calls to bash; Python gets a quarter as many."""
    starts: int
    """Starts of each kind, one after the other."""
    concurrent_starts: int
    live_python: int
    live_bash: int
    peer_calls: int
    peer_starts: int
    bare: int
    sleepers: int = 16


FULL = Plan(4000, 30, 96, 100, 300, 60, 10, 10)
QUICK = Plan(1000, 8, 24, 20, 40, 10, 2, 3)
SMOKE = Plan(4, 1, 1, 1, 1, 1, 1, 1, sleepers=2)


@dataclass(frozen=True, slots=True)
class Bench:
    """A provider, and the account of what it costs."""

    provider: SandboxProvider
    account: Account
    plan: Plan

    async def open(self, *, python: bool) -> Sandbox:
        """Start a sandbox, and open its bash and, with `python`, its Python session."""
        sandbox = await self.provider.start(SPEC)
        await open_sessions(sandbox, BOTH if python else ("bash",))
        return sandbox


async def main(given: Options) -> None:
    plan, peer = given.plan(FULL, QUICK, SMOKE), given.chosen["peer"]
    peers = await peer_figures(peer, plan.peer_calls, plan.peer_starts, plan.sleepers)
    with account() as counted:
        figures = await sandbox_figures(counted, plan)
        figures |= await anyio.to_thread.run_sync(bare_figures, counted, plan)
    figures |= peers
    for name in PEERS:
        theirs, ours = figures[f"{name}_run_p50_ms"], figures["bash_p50_ms"]
        figures[f"bash_speedup_vs_{name}"] = theirs / ours if theirs and ours else None
    settings = {"command": COMMAND, "cell": CELL, "peer": peer, "cpu_time_from": counted.source}
    report("What sandboxes cost", given, settings, dict(sorted(figures.items())), AIMS)


async def sandbox_figures(counted: Account, plan: Plan) -> Figures:
    """Measure this project's sandboxes: memory first, while this process holds nothing else."""
    async with provider() as apptainer:
        bench = Bench(apptainer, counted, plan)
        await (await bench.open(python=True)).close()  # unpacks the image, once
        figures: Figures = {}
        for python in (False, True):
            figures |= await memory(bench, python=python)
        for python in (False, True):
            figures |= await cold_starts(bench, python=python)
        figures |= await round_trips(bench) | await sleepers(bench) | await many_starts(bench)
        return figures | await warm_acquires(bench)


@asynccontextmanager
async def provider() -> AsyncIterator[SandboxProvider]:
    """Make an Apptainer provider with default settings and a separate state folder."""
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as state:
        made = make_provider(ApptainerConfig(), Path(state))
        try:
            yield made
        finally:
            await made.close()


async def cold_starts(bench: Bench, *, python: bool) -> Figures:
    """Start and close sandboxes one after the other, with their sessions open in between."""
    opened, closed, count = [], [], bench.plan.starts
    cpu, host = bench.account.cpu_seconds(), host_cpu_seconds()
    for _ in range(count):
        begun = time.perf_counter()
        sandbox = await bench.open(python=python)
        ready = time.perf_counter()
        await sandbox.close()
        opened.append(ready - begun)
        closed.append(time.perf_counter() - ready)
    kind = "python" if python else "bash"
    return {
        f"cold_start_{'' if python else 'bash_'}p50_s": statistics.median(opened),
        f"close_{kind}_p50_ms": statistics.median(closed) * 1e3,
        f"cpu_s_per_sandbox_{kind}": (bench.account.cpu_seconds() - cpu) / count,
        f"host_cpu_s_per_sandbox_{kind}": (host_cpu_seconds() - host) / count,
    }


async def round_trips(bench: Bench) -> Figures:
    """Run a trivial command, a trivial cell and a program of its own many times in one sandbox."""
    sandbox = await bench.open(python=True)
    bash, python = await sandbox.bash(), await sandbox.python()
    figures = await latencies("bash", lambda: bash.run(COMMAND), bench.plan.calls)
    figures |= await latencies("python", lambda: python.execute(CELL), bench.plan.calls // 4)
    argv = ["sh", "-c", COMMAND]
    figures |= await latencies("exec", lambda: sandbox.exec(argv), bench.plan.calls // 4)
    await sandbox.close()
    return figures


async def latencies(name: str, call: Callable[[], Awaitable[object]], count: int) -> Figures:
    """Return the percentiles of a call, made one after the other."""
    await call()
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - begun) * 1e3)
    return {f"{name}_p50_ms": statistics.median(taken), f"{name}_p99_ms": percentile(taken, 0.99)}


async def sleepers(bench: Bench) -> Figures:
    """Run `sleep 1` in many sandboxes at once."""
    async with live(bench, bench.plan.sleepers, python=False) as sandboxes:
        begun = time.perf_counter()
        async with anyio.create_task_group() as group:
            for sandbox in sandboxes:
                group.start_soon((await sandbox.bash()).run, "sleep 1")
        return {"parallel_sleep_s": time.perf_counter() - begun}


async def many_starts(bench: Bench) -> Figures:
    """Measure starts per second, with some under way at any time."""
    figures: Figures = {}
    for name, python in (("starts_per_second", True), ("starts_per_second_bash", False)):
        count = bench.plan.concurrent_starts
        begun = time.perf_counter()

        async def once(python: bool) -> None:
            await (await bench.open(python=python)).close()

        await at_once([lambda python=python: once(python) for _ in range(count)])
        figures[name] = count / (time.perf_counter() - begun)
    return figures


async def warm_acquires(bench: Bench) -> Figures:
    """Time starts from a full warm pool of one, with both sessions."""
    spec, taken = replace(SPEC, sessions=frozenset(BOTH)), []
    pool = WarmPool(bench.provider, WarmPoolConfig(size=1), ceiling=8)
    async with pool.running():
        await (await pool.start(spec)).close()  # tells the pool what to keep warm
        for _ in range(bench.plan.starts):
            with anyio.fail_after(60):
                while not pool.warm:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            begun = time.perf_counter()
            sandbox = await pool.start(spec)
            await open_sessions(sandbox, BOTH)
            taken.append((time.perf_counter() - begun) * 1e3)
            await use(sandbox, python=True)
            await sandbox.close()
    return {"warm_acquire_p50_ms": statistics.median(taken), "warm_acquire_max_ms": max(taken)}


async def memory(bench: Bench, *, python: bool) -> Figures:
    """Measure the memory of each of many live sandboxes, after a call in every session."""
    kind, count = ("python", bench.plan.live_python) if python else ("bash", bench.plan.live_bash)
    before = await settled_memory()
    async with live(bench, count, python=python) as sandboxes:
        await at_once([lambda one=one: use(one, python=python) for one in sandboxes])
        counted, available = (await settled_memory()).growth(before)
    return {
        f"live_{kind}": count,
        f"mb_per_sandbox_{kind}": max(counted, available) / count,
        f"mb_per_sandbox_{kind}_counted": counted / count,
        f"mb_per_sandbox_{kind}_available": available / count,
    }


async def use(sandbox: Sandbox, *, python: bool) -> None:
    """Check that the sessions work."""
    answer = await (await sandbox.bash()).run(COMMAND)
    result = (await (await sandbox.python()).execute(CELL)).result if python else "2"
    if (answer.output, answer.exit_code, result) != ("hello\n", 0, "2"):
        raise SystemExit(f"a live sandbox does not work: {answer}, {result}")


async def settled_memory() -> Memory:
    """Read memory after a moment for ended processes to be reaped and per-CPU lists to be written back."""
    await anyio.sleep(1.0)
    return await anyio.to_thread.run_sync(read_memory)


@asynccontextmanager
async def live(bench: Bench, count: int, *, python: bool) -> AsyncIterator[list[Sandbox]]:
    """Run `count` sandboxes at once; all close with the block."""
    async with AsyncExitStack() as stack:
        found: list[Sandbox] = []

        async def start() -> None:
            sandbox = await bench.open(python=python)
            stack.push_async_exit(sandbox)
            found.append(sandbox)

        await at_once([start] * count)
        yield found


async def at_once(calls: list[Callable[[], Awaitable[None]]]) -> None:
    """Make the calls, a few at any time."""
    remaining = iter(calls)

    async def work() -> None:
        for call in remaining:
            await call()

    async with anyio.create_task_group() as group:
        for _ in range(STARTERS):
            group.start_soon(work)


def bare_figures(counted: Account, plan: Plan) -> Figures:
    """Measure the parts by themselves; this blocks."""
    apptainer, image = find_apptainer(), ImageStore().resolve("base")
    return {
        **bare_bash(COMMAND, plan.calls),
        **bare_apptainer(counted, apptainer, image, plan.bare),
        **bare_kernels(counted, apptainer, image, plan.bare),
    }
