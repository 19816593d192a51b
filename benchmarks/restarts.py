"""Count what is lost or duplicated when the service is restarted with SIGTERM at random moments under load.

Run: python benchmarks/restarts.py [--json FILE] [--quick | --smoke]

64 rollouts are in flight, submitted by `rollout-service submit` and by a run whose batches a trainer takes. The service
is stopped with SIGTERM and started again on the same port, over and over. Finally the ids on all sides are compared:

- `lost`: rollouts for which `submit` has no result, and groups that neither the trainer nor the service has settled;
- `failed`: rollouts that ended in another way than they should;
- `duplicated`: results that `submit` wrote twice, and groups that came again after they were acknowledged;
- `client_failures`: clients that did not end with success.

The time from the signal to the end of the process must stay below `drain_seconds` plus 3 s.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import Process
from common import HERE, Figures, Options, report, run, scripted_engine
from crash import RUN_ID, Ledger, compare, order

from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import stop
from rollout_service.store.sqlite import SqliteStore
from sandboxes.host.children import start_process
from sandboxes.host.ports import free_port

ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 20, 3, 2
ORDERS_PER_ROUND = 100
IN_FLIGHT = 64
DRAIN_SECONDS = 1.0
LAST_SECONDS = 3.0
TURN_SECONDS = 1.5
"""Longer than the drain: every stop finds rollouts that cannot end in time."""
LONGEST_SECONDS = 2.0
"""A stop comes at a random moment within this time after the last observed progress."""
PROGRESS_SECONDS = 120.0
END_SECONDS = 600.0
SHOWN = 4_000
"""The number of characters shown of a failed client's log, and of a traceback of the service."""
CONFIG = f"""
[pipeline]
init_workers = 16
rollout_workers = {IN_FLIGHT}
drain_seconds = {DRAIN_SECONDS}
[sandboxes.pressure]
enabled = false
"""


@dataclass(slots=True)
class Attached:
    """The service, and the clients that are attached to it."""

    folder: Path
    engine_url: str
    rounds: int
    port: int = field(default_factory=free_port)
    stops: list[float] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The service's URL, through all restarts."""
        return f"http://127.0.0.1:{self.port}"

    def path(self, name: str) -> Path:
        return self.folder / name

    async def start_service(self) -> None:
        self.path("rollout.toml").write_text(CONFIG)
        flags = ["serve", "--config", str(self.path("rollout.toml")), "--port", str(self.port)]
        flags += ["--state-dir", str(self.path("state")), "--sandbox", "local"]
        await self._start(
            "service", ["-m", "rollout_service.cli", *flags, "--engine", "none", "--backend", self.engine_url]
        )

    async def start_clients(self) -> None:
        """Submit rollouts, and train on the batches of the run."""
        questions = ({"question": f"{n} + 2", "answer": str(n + 2)} for n in range(self.rounds * ORDERS_PER_ROUND))
        lines = (json.dumps({"task": {"environment": "math", "instance": one}}) for one in questions)
        self.path("orders.jsonl").write_text("\n".join(lines))
        submit = ["submit", str(self.path("orders.jsonl")), "--output", str(self.path("results.jsonl"))]
        submit += ["--url", self.url, "--concurrency", str(IN_FLIGHT)]
        await self._start("submit", ["-m", "rollout_service.cli", *submit])
        await self._start(
            "trainer",
            [str(HERE / "programs" / "crash_trainer.py"), self.url, RUN_ID, str(self.path("ledger.jsonl"))],
        )

    async def restart(self) -> None:
        """Stop the service as an operator does, and start it again."""
        service = self.processes["service"]
        begun = time.perf_counter()
        service.send_signal(signal.SIGTERM)
        await service.wait()
        self.stops.append(time.perf_counter() - begun)
        await service.aclose()
        await self.start_service()

    async def progress(self) -> None:
        """Wait until the trainer has acknowledged a batch, and `submit` has written a result."""
        before = self._progress()
        with anyio.fail_after(PROGRESS_SECONDS):
            while any(now <= then for now, then in zip(self._progress(), before, strict=True)):
                if self.processes["submit"].returncode is not None:
                    return
                await anyio.sleep(0.05)

    async def failures(self) -> int:
        """Wait until the clients have ended, and return how many failed."""
        with anyio.fail_after(END_SECONDS):
            failed = [name for name in ("submit", "trainer") if await self.processes[name].wait() != 0]
        for name in failed:
            sys.stderr.write(f"{name}: {self.path(f'{name}.log').read_text()[-SHOWN:]}\n")
        return len(failed)

    async def close(self) -> None:
        """End the processes that still run."""
        for process in self.processes.values():
            await stop(process)

    def _progress(self) -> tuple[int, int]:
        results = self.path("results.jsonl")
        written = results.read_bytes().count(b"\n") if results.exists() else 0
        return written, len(Ledger.read(self.path("ledger.jsonl")).acknowledged)

    async def _start(self, name: str, arguments: list[str]) -> None:
        with self.path(f"{name}.log").open("ab") as log:
            self.processes[name] = await start_process([sys.executable, *arguments], stdout=log, stderr=log)


async def main(given: Options) -> None:
    rounds = given.plan(ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS)
    seed = time.time_ns()
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="restarts-") as name:
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(engine(Path(name)))
            attached = Attached(Path(name), url, rounds)
            stack.push_async_callback(attached.close)
            await attached.start_service()
            client = await stack.enter_async_context(RolloutClient(attached.url, patience_seconds=120))
            await client.ready()
            await client.create_run(order(Path(name)))
            await attached.start_clients()
            for _ in range(rounds):
                await attached.progress()
                await anyio.sleep(draw.uniform(0, LONGEST_SECONDS))
                await attached.restart()
            await attached.progress()
            await client.open_run(RUN_ID).end()
            failures = await attached.failures()
        figures = await count(attached, failures)
    settings = {"seed": seed, "in_flight": IN_FLIGHT, "drain_seconds": DRAIN_SECONDS}
    aims = dict.fromkeys(("lost", "failed", "duplicated", "client_failures", "tracebacks"), "0")
    aims["shutdown_seconds_max"] = f"<= {DRAIN_SECONDS + LAST_SECONDS:g}"
    report("SIGTERM at random moments", given, settings, figures, aims)


def engine(folder: Path) -> AbstractAsyncContextManager[str]:
    """Start an engine whose turns take `TURN_SECONDS`."""
    options = ("--delay", f"{TURN_SECONDS:g}", "--turn", "No idea.<|im_end|>")
    return scripted_engine(folder / "engine.address", *options)


async def count(attached: Attached, failures: int) -> Figures:
    """Count what the service, the trainer and the submission report."""
    async with await SqliteStore.open(attached.path("state") / "rollouts.sqlite3") as store:
        batches = await compare(Ledger.read(attached.path("ledger.jsonl")), store)
    lines = attached.path("results.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    results = Counter(rollout["rollout_id"] for rollout in rollouts)
    failed = sum(rollout["state"] != "completed" for rollout in rollouts)
    ordered = attached.rounds * ORDERS_PER_ROUND
    log = attached.path("service.log").read_text()
    if (begin := log.find("Traceback")) >= 0:
        sys.stderr.write(f"service: {log[begin : begin + SHOWN]}\n")
    return {
        "restarts": len(attached.stops),
        "lost": int(batches["lost"] or 0) + ordered - len(results),
        "failed": int(batches["failed"] or 0) + failed,
        "duplicated": int(batches["duplicated"] or 0) + len(lines) - len(results),
        "client_failures": failures,
        "tracebacks": log.count("Traceback"),
        "shutdown_seconds_median": statistics.median(attached.stops),
        "shutdown_seconds_max": max(attached.stops),
        "results": len(results),
        "groups_acknowledged": batches["groups_acknowledged"],
    }


if __name__ == "__main__":
    run(main, __doc__ or "")
