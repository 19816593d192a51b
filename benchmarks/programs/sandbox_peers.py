"""Measures the sandboxes of another project as `sandboxes.py` measures ours, without this project.

Run: .venv-sandbox-peers/bin/python benchmarks/programs/sandbox_peers.py PEER IMAGE CALLS STARTS SLEEPERS

It prints one JSON object of figures, which the docstring of `sandboxes.py` explains. Each peer is an entry of `PEERS`,
used as its documentation says. SWE-ReX has short timeouts of its own, which it runs into on a busy machine; what was
being measured then begins anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

Run = Callable[[str], Awaitable[str]]
"""Run a command line in a sandbox, and return its output."""
Peer = Callable[[str], AbstractAsyncContextManager[Run]]
"""Start a sandbox of an image; it closes with the block."""

TIME_OUTS = 10
"""The number of timeouts after which the machine is too busy to measure anything."""

interrupted = asyncio.Event()
"""Set by a signal, and seen before the next command: a start or a close that is cancelled leaves things behind."""


@asynccontextmanager
async def docker(image: str) -> AsyncIterator[Run]:
    """Run a container, and `docker exec` in it."""
    made = await client("run", "--detach", "--rm", "--network=none", image, "sleep", "infinity")
    name = made.strip()

    async def run(command: str) -> str:
        return await client("exec", name, "sh", "-c", command)

    try:
        yield run
    finally:
        await client("kill", name)


async def client(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"docker {arguments[0]} failed")
    return output.decode()


@asynccontextmanager
async def inspect(_: str) -> AsyncIterator[Run]:
    """Make Inspect's local sandbox: a folder, and a process for each command."""
    from inspect_ai.util._sandbox.local import LocalSandboxEnvironment as Local

    made = await Local.sample_init("benchmark", None, {})

    async def run(command: str) -> str:
        # Without this, as many processes as there are cores run at once, and the others wait for them.
        return (await made["default"].exec(["sh", "-c", command], concurrency=False)).stdout

    try:
        yield run
    finally:
        await Local.sample_cleanup("benchmark", None, made, interrupted=False)


@asynccontextmanager
async def nemo_gym(image: str) -> AsyncIterator[Run]:
    """Start a sandbox of NeMo Gym's Apptainer provider: an instance, and an `apptainer exec` for each command."""
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

    # As root, it may lack a capability that Apptainer wants to keep.
    flags = ["--no-privs"] if os.geteuid() == 0 else []
    settings = {"create": {"extra_start_args": flags}, "exec": {"extra_exec_args": flags}}
    async with AsyncSandbox({"apptainer": settings}, SandboxSpec(image=image)) as sandbox:
        await sandbox.start()

        async def run(command: str) -> str:
            return (await sandbox.exec(command)).stdout or ""

        yield run


@asynccontextmanager
async def swerex(_: str) -> AsyncIterator[Run]:
    """Open a bash session of SWE-ReX's local runtime, which isolates nothing."""
    from swerex.exceptions import CommandTimeoutError
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    runtime = LocalRuntime(logger=logging.getLogger("quiet"))

    async def run(command: str) -> str:
        try:
            return (await runtime.run_in_session(BashAction(command=command))).output
        except CommandTimeoutError as error:
            raise TimeoutError from error

    try:
        await runtime.create_session(CreateBashSessionRequest(startup_timeout=10.0))
        yield run
    except CommandTimeoutError as error:
        raise TimeoutError from error
    finally:
        await runtime.close()


PEERS: Mapping[str, Peer] = {"docker": docker, "inspect": inspect, "nemo_gym": nemo_gym, "swerex": swerex}


async def hello(run: Run) -> None:
    """Run the trivial command."""
    if interrupted.is_set():
        raise SystemExit("interrupted")
    if (output := (await run("echo hello")).strip()) != "hello":
        raise SystemExit(f"unexpected output: {output!r}")


async def round_trips(peer: Peer, image: str, calls: int) -> float:
    """Return the median time of the trivial command in one sandbox, in milliseconds."""
    taken = []
    async with peer(image) as run:
        await hello(run)
        for _ in range(calls):
            begun = time.perf_counter()
            await hello(run)
            taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


async def starts(peer: Peer, image: str, count: int) -> float:
    """Return the median time from the start of a sandbox to its answer to the first command, in seconds."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        async with peer(image) as run:
            await hello(run)
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


async def sleepers(peer: Peer, image: str, count: int) -> float:
    """Return the seconds until `sleep 1` has ended in all of these sandboxes."""
    async with AsyncExitStack() as stack:
        runs = []
        for _ in range(count):
            runs.append(await stack.enter_async_context(peer(image)))
            await hello(runs[-1])
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run("sleep 1"))
        return time.perf_counter() - begun


async def main(peer: Peer, image: str, calls: int, count: int, sleeping: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    time_outs = 0

    async def measure(figure: Callable[[Peer, str, int], Awaitable[float]], amount: int) -> float:
        nonlocal time_outs
        while time_outs <= TIME_OUTS:
            try:
                return await figure(peer, image, amount)
            except* TimeoutError:
                time_outs += 1
        raise SystemExit("the machine is too busy: the sandboxes ran into their own timeouts again and again")

    figures = {
        "run_p50_ms": await measure(round_trips, calls),
        "start_p50_s": await measure(starts, count),
        "parallel_sleep_s": await measure(sleepers, sleeping),
        "time_outs": time_outs,
    }
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(PEERS[sys.argv[1]], sys.argv[2], *map(int, sys.argv[3:])))
