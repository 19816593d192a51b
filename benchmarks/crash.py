"""Count what is lost or duplicated when the service, the trainer, or both are killed with SIGKILL at random moments.

Run: python benchmarks/crash.py [--store sqlite|redis] [--json FILE] [--quick | --smoke]

With `--store redis`, two services share a Redis. The other service and the Redis itself are killed too, alone and with
the rest.

A trainer takes batches of a run. Before it continues, it records each batch and each acknowledgment in a ledger on
disk. After the last kill, the run is ended and drained. Then the ids on both sides are compared:

- `lost`: tasks that the cursor has passed but that were neither acknowledged nor cancelled when the run was ended, and
  batches that the trainer saw acknowledged but the service does not record as such;
- `failed`: rollouts in acknowledged batches that do not count, since they failed;
- `duplicated`: groups that came again after the trainer saw them acknowledged, or were acknowledged in two batches.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import Process
from common import HERE, Figures, Options, folder_kept_on_error, report, run, scripted_engine
from support.redis_usage import MeasuredRedis, redis_program

from api_schemas.runs import FileTasks, RunRequest
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import stop
from rollout_service.cluster.identity import is_gone
from rollout_service.store import Store
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.sqlite import SqliteStore
from sandboxes.host.children import start_process
from sandboxes.host.ports import free_port

RUN_ID = "crash"
TASKS = 50
ROUNDS = 100
REDIS_SOCKET = "redis.sock"
VICTIMS = {
    "sqlite": (("trainer",), ("service",), ("trainer", "service")),
    "redis": (("redis",), ("service",), ("other",), ("trainer",), ("redis", "service", "other", "trainer")),
}
LONGEST_SECONDS = 2.0
"""A kill comes at a random moment within this time after the last observed progress."""
PROGRESS_SECONDS = 600.0
DRAIN_SECONDS = 600.0


@dataclass(slots=True)
class Ledger:
    """The trainer's ledger."""

    acknowledged: dict[str, list[int]] = field(default_factory=dict)
    came_again: int = 0
    """Groups that came after the trainer saw them acknowledged."""
    masked: int = 0
    """Rollouts in acknowledged batches that do not count."""
    delivered_again: int = 0
    """Batches that came more than once, as they should when they were not acknowledged."""

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Read all complete lines; a kill may have cut one short."""
        ledger = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            ledger._take(entry)
        return ledger

    def _take(self, entry: dict[str, object]) -> None:
        groups = [int(str(number)) for number in entry["groups"]] if isinstance(entry["groups"], list) else []
        if "acknowledged" in entry:
            self.acknowledged[str(entry["acknowledged"])] = groups
            self.masked += int(str(entry["masked"]))
            return
        settled = {number for numbers in self.acknowledged.values() for number in numbers}
        self.came_again += len(settled & set(groups))
        self.delivered_again += entry["delivery"] != 1


class Victims:
    """The processes that are killed and restarted."""

    def __init__(self, folder: Path, engine_url: str, redis: Path | None) -> None:
        """Take the program of a Redis, which two services are to share; without it one service uses SQLite."""
        self.folder = folder
        self.ledger = folder / "ledger.jsonl"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        trainer = [str(HERE / "programs" / "crash_trainer.py"), self.url, RUN_ID, str(self.ledger)]
        self._commands: dict[str, Sequence[str]] = {
            "service": self._serve("service", engine_url, self.port, is_shared=redis is not None),
            "trainer": [sys.executable, *trainer],
        }
        if redis is not None:
            self._commands["redis"] = [str(redis), *_redis_options(folder)]
            self._commands["other"] = self._serve("other", engine_url, free_port(), is_shared=True)
        self.processes: dict[str, Process] = {}

    def _serve(self, name: str, engine_url: str, port: int, *, is_shared: bool) -> Sequence[str]:
        """Return the command of a service, after writing its settings."""
        config = self.folder / f"{name}.toml"
        store = f'[store]\nurl = "unix://{self.folder / REDIS_SOCKET}"\n[cluster]\nname = "{name}"\n'
        config.write_text("[pipeline]\nmax_attempts = 1000\ndrain_seconds = 1\n" + (store if is_shared else ""))
        serve = ["-m", "rollout_service.cli", "serve", "--config", str(config), "--port", str(port)]
        serve += ["--state-dir", str(self.folder / f"state-{name}"), "--sandbox", "local"]
        return [sys.executable, *serve, "--log-level", "warning", "--engine", "none", "--backend", engine_url]

    async def start(self, name: str) -> None:
        """Start one of them; a Redis has read its files when this returns."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await start_process(self._commands[name], stdout=log, stderr=log)
        if name == "redis":
            await MeasuredRedis(self.folder).wait_until_ready()

    async def kill(self, names: Sequence[str]) -> None:
        """Send SIGKILL to all of them at once, and restart them."""
        for name in names:
            if self.processes[name].returncode is None:
                self.processes[name].kill()
        for name in names:
            await self.processes[name].wait()
            await self.processes[name].aclose()
            await self.start(name)

    async def progress(self) -> None:
        """Wait until another batch is acknowledged."""
        before = len(Ledger.read(self.ledger).acknowledged)
        with anyio.fail_after(PROGRESS_SECONDS):
            while len(Ledger.read(self.ledger).acknowledged) == before:  # noqa: ASYNC110 - another process writes it
                await anyio.sleep(0.05)

    async def close(self, *, but: str | None = None) -> None:
        """End the processes that still run, but one."""
        for name, process in self.processes.items():
            if name != but:
                await stop(process)


def order(folder: Path) -> RunRequest:
    """Return an endless run over a small file."""
    path = folder / "tasks.jsonl"
    lines = [json.dumps({"question": f"{number} + 1", "answer": str(number + 1)}) for number in range(TASKS)]
    path.write_text("\n".join(lines))
    source = FileTasks(path=str(path), environment="math", epochs=None, shuffle=True)
    return RunRequest(run_id=RUN_ID, source=source, group_size=2, batch_size=2, filters=[], infrastructure_retries=100)


async def main(given: Options) -> None:
    kind = given.chosen["store"]
    kinds = VICTIMS[kind]
    redis = await redis_program() if kind == "redis" else None
    rounds = given.plan(ROUNDS, len(kinds), len(kinds))
    seed = time.time_ns()
    draw = random.Random(seed)
    started = time.perf_counter()
    with folder_kept_on_error("crash-") as folder:
        async with AsyncExitStack() as stack:
            engine = scripted_engine(folder / "engine.address", "--delay", "0.05", "--turn", "No idea.<|im_end|>")
            url = await stack.enter_async_context(engine)
            victims = Victims(folder, url, redis)
            stack.push_async_callback(victims.close)
            for name in ("service",) if redis is None else ("redis", "service", "other"):
                await victims.start(name)
            client = await stack.enter_async_context(RolloutClient(victims.url, patience_seconds=120))
            await client.ready()
            await client.create_run(order(folder))
            await victims.start("trainer")
            for number in range(rounds):
                await victims.progress()
                await anyio.sleep(draw.uniform(0, LONGEST_SECONDS))
                await victims.kill(kinds[number % len(kinds)])
            await client.open_run(RUN_ID).end()
            with anyio.fail_after(DRAIN_SECONDS):
                await victims.processes["trainer"].wait()
            await victims.close(but="redis")
            async with await open_store(folder, is_shared=redis is not None) as store:
                figures = await compare(Ledger.read(victims.ledger), store)
    figures = {"rounds": rounds} | figures | {"seconds": round(time.perf_counter() - started, 1)}
    report(
        "kill -9 at random moments",
        given,
        {"seed": seed, "store": kind},
        figures,
        dict.fromkeys(("lost", "failed", "duplicated"), "0"),
    )


def _redis_options(folder: Path) -> list[str]:
    """Return the options of a durable Redis."""
    options = {"port": "0", "save": "", "appendonly": "yes", "appendfsync": "always", "dir": str(folder)}
    options["unixsocket"] = str(folder / REDIS_SOCKET)
    return [text for name, value in options.items() for text in (f"--{name}", value)]


async def open_store(folder: Path, *, is_shared: bool) -> SqliteStore | RedisStore:
    """Open the store that the services used."""
    if not is_shared:
        return await SqliteStore.open(folder / "state-service" / "rollouts.sqlite3")
    return await RedisStore.open(RedisConfig(f"unix://{folder / REDIS_SOCKET}"), is_gone=is_gone)


async def compare(ledger: Ledger, store: Store) -> Figures:
    run_record = await store.runs.get(RUN_ID)
    standing = await store.runs.group_states(RUN_ID)
    by_service = {number for number, state in standing.items() if state == "acknowledged"}
    settled = by_service | {number for number, state in standing.items() if state == "dropped:cancelled"}
    skipped = set(range(run_record.cursor)) - settled
    by_trainer = Counter(number for numbers in ledger.acknowledged.values() for number in numbers)
    return {
        "lost": len(skipped) + len(set(by_trainer) - by_service),
        "failed": ledger.masked,
        "duplicated": ledger.came_again + sum(count - 1 for count in by_trainer.values()),
        "groups_acknowledged": len(by_service),
        "batches_delivered_again": ledger.delivered_again,
    }


if __name__ == "__main__":
    run(main, __doc__ or "", {"store": ["sqlite", "redis"]})
