"""What the benchmarks share: options, reports, and the processes that they measure.

Every benchmark is one command. `--json FILE` writes the machine, the settings, and flat figures; `--quick` takes at
most a minute and gives the same keys. Modules that benchmarks import are in `support/`, and programs that they start
are in `programs/`.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from pydantic import JsonValue
from rich.console import Console
from rich.table import Table

from rollout_client.client import RolloutClient
from rollout_service.cli.figures import write_figures
from rollout_service.cli.server_child import running_server, stop
from sandboxes.host.children import start_process

HERE = Path(__file__).parent
START_SECONDS = 60.0

Main = Callable[["Options"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of every benchmark."""

    json: Path | None
    quick: bool


def run(main: Main, description: str) -> None:
    """Run a benchmark; whatever ends it, including SIGTERM, the processes that it started end first."""
    given = _options(description)

    async def watched() -> bool:
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_on_signal, group.cancel_scope)
            await main(given)
            group.cancel_scope.cancel()
            return True
        return False

    if not anyio.run(watched, backend_options={"use_uvloop": True}):
        raise SystemExit("interrupted")


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


def _options(description: str) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="at most a minute, with the same keys")
    arguments = parser.parse_args()
    return Options(json=arguments.json, quick=arguments.quick)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a `share` of the values lies."""
    return sorted(values)[int(len(values) * share)]


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def report(
    title: str,
    given: Options,
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str],
) -> None:
    """Show the figures next to their aims, and write them to the requested file."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    if aims:
        table.add_column("aim", justify="right")
    for name, value in figures.items():
        cells = [name, "-" if value is None else f"{value:,.2f}", aims.get(name, "")]
        table.add_row(*cells[: len(table.columns)])
    Console(width=100).print(table)
    if given.json is not None:
        write_figures(given.json, {**settings, "quick": given.quick}, figures)


@dataclass(frozen=True, slots=True)
class Server:
    """A running service, with a client."""

    client: RolloutClient
    process: psutil.Process

    @property
    def memory_mb(self) -> float:
        """Resident memory of only the service's process, in MB (10^6 bytes)."""
        return float(self.process.memory_info().rss) / 1e6

    @property
    def cpu_seconds(self) -> float:
        """CPU time of only the service's process."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def service(
    state_dir: Path, engine_url: str, *, workers: int, environment: Path
) -> AsyncIterator[Server]:
    """Run `rollout-service serve` with local sandboxes and `workers` rollout workers."""
    config = state_dir / "rollout.toml"
    config.write_text(
        f'[sandbox]\nprovider = "local"\n'
        f"[pipeline]\ninit_workers = 16\ninit_queue = 64\nrollout_queue = 16\nrollout_workers = {workers}\n"
        f"evaluate_workers = 16\n"
        "[sandboxes.pressure]\nenabled = false\n"  # the load is intended, and must not throttle starts
    )
    flags = ["--config", str(config), "--engine", "none", "--backend", engine_url]
    flags += ["--environment", str(environment), "--log-level", "warning"]
    async with running_server(state_dir, flags, start_seconds=START_SECONDS) as client:
        pid = int((state_dir / "rollouts.sqlite3.lock").read_text())
        yield Server(client, psutil.Process(pid))


@asynccontextmanager
async def child(arguments: Sequence[str], address: Path) -> AsyncIterator[str]:
    """Run a Python program that writes its URL to a file once it listens; it ends with the block."""
    with address.with_suffix(".log").open("wb") as log:
        process = await start_process([sys.executable, *arguments], stdout=log, stderr=log, new_session=True)
    try:
        with anyio.fail_after(START_SECONDS):
            while not await anyio.Path(address).exists():
                if process.returncode is not None:
                    raise RuntimeError(f"{arguments[0]} ended with exit code {process.returncode}")
                await anyio.sleep(0.05)
        yield (await anyio.Path(address).read_text()).strip()
    finally:
        await stop(process)
