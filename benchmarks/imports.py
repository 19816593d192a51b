"""Measure what a start costs: CPU time of `--version`, `--help`, and `serve` until it listens, and the loaded modules.

Run: python benchmarks/imports.py [--json FILE] [--quick | --smoke]

Figures are medians of several starts, each kind in turn, after one start that compiles the modules. CPU time is user
and system time of the process and its children, because the time by the clock depends on other work. `serve` has no
engine and local sandboxes; it counts until `/health` answers. `limit_*` figures are for a bare Python, and for a server
of FastAPI on uvicorn that has only `/health`. `modules` are those that the process of `serve` has imported by then,
in a start of its own, because Python takes longer when it notes its imports.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import psutil
from common import HERE, START_SECONDS, Figures, Options, child, report, run, temporary_folder
from support.accounting import run_measured

POLL_SECONDS = 0.02
AIMS = {"version_cpu_s": "<= 0.3"}
COMMAND = ("-m", "rollout_service.cli")
COMMANDS = {
    "limit_version_cpu_s": ("-c", "pass"),
    "version_cpu_s": (*COMMAND, "--version"),
    "help_cpu_s": (*COMMAND, "--help"),
}
IMPORTED = re.compile(r"^import time: +\d+ \| +\d+ \| *(\S+)$", re.MULTILINE)


async def main(given: Options) -> None:
    starts = given.plan(11, 3, 1)
    figures: Figures = {}
    with temporary_folder() as folder:
        servers = {
            "limit_serve_cpu_s": (str(HERE / "programs" / "bare_server.py"), str(folder / "address")),
            "serve_cpu_s": (*COMMAND, *_serve(folder)),
        }
        figures["limit_modules"] = await modules(folder, servers["limit_serve_cpu_s"])
        figures["modules"] = await modules(folder, servers["serve_cpu_s"])
        seconds = defaultdict[str, list[float]](list)
        for _ in range(starts):
            for key, arguments in COMMANDS.items():
                seconds[key].append(run_measured([sys.executable, *arguments]).cpu_seconds)
            for key, arguments in servers.items():
                async with started(folder, arguments) as process:
                    seconds[key].append(server_seconds(process))
    figures |= {key: statistics.median(values) for key, values in seconds.items()}
    report("What a start costs", given, {"starts": starts}, dict(sorted(figures.items())), AIMS)


def _serve(folder: Path) -> list[str]:
    command = ["serve", "--port", "0", "--port-file", str(folder / "address")]
    return [*command, "--state-dir", str(folder / "state"), "--engine", "none", "--sandbox", "local"]


def server_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a running program and its children."""
    times = [process.cpu_times(), *(other.cpu_times() for other in process.children(recursive=True))]
    return sum(float(one.user + one.system + one.children_user + one.children_system) for one in times)


async def modules(folder: Path, arguments: Sequence[str]) -> int:
    """Return how many modules a server has imported once it answers."""
    async with started(folder, ["-X", "importtime", *arguments]):
        return len(set(IMPORTED.findall((folder / "address.log").read_text())))


@asynccontextmanager
async def started(folder: Path, arguments: Sequence[str]) -> AsyncIterator[psutil.Process]:
    """Run a server that writes its URL to `address` in the folder, and yield its process once it answers."""
    address = folder / "address"
    address.unlink(missing_ok=True)
    async with child(arguments, address) as url, httpx.AsyncClient() as client:
        with anyio.fail_after(START_SECONDS):
            await _answer(client, f"{url}/health")
        (process,) = psutil.Process().children()
        yield process


async def _answer(client: httpx.AsyncClient, url: str) -> None:
    while True:
        try:
            (await client.get(url)).raise_for_status()
        except httpx.HTTPError:
            await anyio.sleep(POLL_SECONDS)
        else:
            return


if __name__ == "__main__":
    run(main, "Measure what a start costs.")
