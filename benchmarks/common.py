"""What the benchmarks share: options, reports, and the processes that they measure.

Every benchmark is one command. `--json FILE` writes the machine, the settings, and flat figures. `--quick` takes at
most a minute, and `--smoke` as little as takes every part of the program: its figures mean nothing, but the keys are
the same. Modules that benchmarks import are in `support/`, and programs that they start are in `programs/`.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import anyio
import psutil
from pydantic import JsonValue
from rich.console import Console
from rich.table import Table

from rollout_client.client import RolloutClient
from rollout_service.cli.demo.run import write_figures
from rollout_service.cli.server_child import running_child, stop
from sandboxes.host.children import start_process

HERE = Path(__file__).parent
START_SECONDS = 60.0
SHOWN = 2_000
"""How many characters are shown of the log of a program that did not start."""

Main = Callable[["Options"], Awaitable[None]]
Figures = dict[str, float | int | None]
PlanT = TypeVar("PlanT")


class Size(StrEnum):
    FULL = "full"
    QUICK = "quick"
    SMOKE = "smoke"


@dataclass(frozen=True, slots=True)
class Options:
    json: Path | None
    size: Size
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The values of the benchmark's own options by name."""

    def plan(self, full: PlanT, quick: PlanT, smoke: PlanT) -> PlanT:
        return {Size.FULL: full, Size.QUICK: quick, Size.SMOKE: smoke}[self.size]


def run(main: Main, description: str, choices: Mapping[str, Sequence[str]] | None = None) -> None:
    """Run a benchmark; whatever ends it, including SIGTERM, the processes that it started end first.

    `choices` are options of its own with their values, of which the first is the default.
    """
    given = _options(description, choices or {})

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


def _options(description: str, choices: Mapping[str, Sequence[str]]) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    sizes = parser.add_mutually_exclusive_group()
    for size, told in ((Size.QUICK, "at most a minute"), (Size.SMOKE, "only to see that everything works")):
        text = f"{told}, with the same keys"
        sizes.add_argument(f"--{size}", action="store_const", const=size, dest="size", help=text)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0], help=f"(default: {values[0]})")
    arguments = vars(parser.parse_args())
    chosen = {name: str(arguments[name]) for name in choices}
    return Options(json=arguments["json"], size=arguments["size"] or Size.FULL, chosen=chosen)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a `share` of the values lies."""
    return sorted(values)[int(len(values) * share)]


def report(
    title: str,
    given: Options,
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str],
) -> None:
    """Show the figures next to their aims, and write them to the requested file.

    Raises:
        ValueError: An aim has no figure.
    """
    if unknown := aims.keys() - figures.keys():
        raise ValueError(f"there are aims without a figure: {', '.join(sorted(unknown))}")
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
        write_figures(given.json, {**settings, "size": given.size}, figures, aims)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        yield Path(name)


@contextmanager
def folder_kept_on_error(prefix: str) -> Iterator[Path]:
    """Make a folder with a short path for the block; it is removed, unless the block fails and its logs are of use."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    folder.chmod(0o755)  # sandboxes run as another user, who must reach theirs
    try:
        yield folder
    except Exception:
        sys.stderr.write(f"the logs are in {folder}\n")
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Server:
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
    state_dir: Path,
    engine_url: str,
    *,
    workers: int,
    environment: Path,
    pipeline: str = "",
    provider: str = "local",
) -> AsyncIterator[Server]:
    """Run `rollout-service serve` with `workers` rollout workers; `pipeline` has more settings."""
    config = state_dir / "rollout.toml"
    config.write_text(
        f'[sandbox]\nprovider = "{provider}"\n'
        f"[pipeline]\ninit_workers = 16\ninit_queue = 64\nrollout_queue = 16\nrollout_workers = {workers}\n"
        f"evaluate_workers = 16\n{pipeline}"
        "[sandboxes.pressure]\nenabled = false\n"  # the load is intended, and must not throttle starts
    )
    flags = ["--config", str(config), "--engine", "none", "--backend", engine_url]
    flags += ["--environment", str(environment), "--log-level", "warning"]
    async with running_child(state_dir, flags) as server:
        yield Server(server.client, psutil.Process(server.process.pid))


@asynccontextmanager
async def child(arguments: Sequence[str], address: Path) -> AsyncIterator[str]:
    """Run a Python program that writes its URL to a file once it listens; it ends with the block."""
    log = address.with_suffix(".log")
    with log.open("wb") as file:
        process = await start_process([sys.executable, *arguments], stdout=file, stderr=file, new_session=True)
    try:
        with anyio.fail_after(START_SECONDS):
            while not await anyio.Path(address).exists():
                if process.returncode is not None:
                    said = log.read_text(errors="replace")[-SHOWN:]
                    raise RuntimeError(f"{arguments[0]} ended with exit code {process.returncode}: {said}")
                await anyio.sleep(0.05)
        yield (await anyio.Path(address).read_text()).strip()
    finally:
        await stop(process)


def told_address(arguments: Sequence[str], address: Path) -> AbstractAsyncContextManager[str]:
    """Run a program that takes `--address`, the file for its URL, as an option."""
    return child([*arguments, "--address", str(address)], address)


def scripted_engine(address: Path, *options: str) -> AbstractAsyncContextManager[str]:
    return told_address(["-m", "rollout_service.testing", *options], address)


def timed_engine(folder: Path, delay: float, *options: str) -> AbstractAsyncContextManager[str]:
    """Run `engine.py`, which appends the times of its turns to the file `turns` in the folder."""
    command = [str(HERE / "engine.py"), "--delay", str(delay), "--record", str(folder / "turns"), *options]
    return told_address(command, folder / "engine")
