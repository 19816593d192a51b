"""Measure the durable store: submits, claims, stages, results, and reads per second, with 256 callers at once.

Run: python benchmarks/store.py [--store sqlite|redis|s3] [--json FILE] [--quick | --smoke]

Every write is on the disk before it counts; results carry a trajectory of about 5 KB of JSON. The store's file is in
the folder for temporary files: set TMPDIR to a folder on the disk to measure. `--store redis` measures SQLite first,
then a Redis that it starts in that folder, and prints what a rollout takes in Redis. At last it does so with long
trajectories, of about 20 kB once they are encoded, in Redis itself and in a shared folder. `--store s3` measures such
trajectories in a folder and in an object store that it starts (`.cache/seaweedfs`): one caller at a time, and many.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from common import HERE, Figures, Options, report, run
from support.redis_usage import measured_redis

sys.path.insert(0, str(HERE.parent))  # the tests' object store
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_service.store import Lease, Store
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments import SegmentFiles
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.segments.s3 import open_objects
from rollout_service.store.sqlite import SqliteStore
from tests.support.store.object_server import SERVICE, ObjectServer, keys, object_server

T = TypeVar("T")

CALLERS = 256
OWNER = "benchmark"
TOKENS = 150
LONG_TOKENS = 1_900
ALONE = 200


def trajectory(tokens: int) -> Trajectory:
    """Make a trajectory, with about 35 bytes of JSON for each token."""
    draw = random.Random(0)
    segment = Segment(
        token_ids=[draw.randrange(150_000) for _ in range(tokens)],
        loss_mask=[1] * tokens,
        logprobs=[-draw.random() for _ in range(tokens)],
        versions=[0] * tokens,
        turn_ids=[0] * tokens,
        fork_reason=ForkReason.FIRST,
    )
    return Trajectory(
        segments=[segment],
        messages=[Message(role="user", content="What is 12 * 30?")],
        finish_reasons=[FinishReason.STOP],
        fork_counts={ForkReason.FIRST: 1},
    )


async def rate(items: Sequence[T], call: Callable[[T], Awaitable[Any]], callers: int = CALLERS) -> float:
    """Return the calls per second, with `callers` at once."""
    remaining = iter(items)

    async def work() -> None:
        for item in remaining:
            await call(item)

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(callers):
            group.start_soon(work)
    return len(items) / (time.perf_counter() - started)


@dataclass(slots=True)
class Lives:
    """The lives of many rollouts in one store, phase by phase."""

    store: Store
    requests: Sequence[RolloutRequest]
    sample: Trajectory
    leases: list[Lease] = field(default_factory=list)

    async def submit(self) -> dict[str, float]:
        alone = min(200, len(self.requests) // 4)
        return {
            "submits_per_second_c1": await rate(self.requests[:alone], self.store.submit, 1),
            "submits_per_second_c256": await rate(self.requests[alone:], self.store.submit),
        }

    async def claim(self) -> dict[str, float]:
        started = time.perf_counter()
        while batch := await self.store.claim(OWNER, limit=32, lease_seconds=600):
            self.leases += batch
        return {"claims_per_second": len(self.leases) / (time.perf_counter() - started)}

    async def advance(self) -> dict[str, float]:
        return {"stages_per_second_c256": await rate(self.leases, self._advance)}

    async def finish(self) -> dict[str, float]:
        return {"results_per_second_c256": await rate(self.leases, self._finish)}

    async def read(self) -> dict[str, float]:
        return {"reads_per_second_c256": await rate(self.leases, lambda lease: self.store.get(lease.rollout_id))}

    async def _advance(self, lease: Lease) -> None:
        if not await self.store.advance(lease, OWNER, RolloutState.ROLLOUT):
            raise RuntimeError("a lease was lost")

    async def _finish(self, lease: Lease) -> None:
        result = Rollout(
            rollout_id=lease.rollout_id,
            state=RolloutState.COMPLETED,
            task=lease.request.task,
            pool=lease.request.pool,
            reward=1.0,
            created_at=lease.created_at,
            trajectory=self.sample,
        )
        if not await self.store.finish(lease, OWNER, result):
            raise RuntimeError("a lease was lost")


async def measure_sqlite(requests: Sequence[RolloutRequest], sample: Trajectory) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as folder:
        async with await SqliteStore.open(Path(folder) / "store.sqlite3") as store:
            lives = Lives(store, requests, sample)
            figures: dict[str, float] = {}
            for phase in (lives.submit, lives.claim, lives.advance, lives.finish, lives.read):
                figures |= await phase()
    return figures | {"sqlite_rollouts_per_second": whole_lives(figures)}


async def measure_redis(requests: Sequence[RolloutRequest], sample: Trajectory) -> dict[str, float]:
    """Return the figures of the Redis store, and what it uses of Redis for each rollout."""
    count = len(requests)
    async with measured_redis() as server, await open_redis(server.url) as store:
        lives = Lives(store, requests, sample)
        before = await server.usage()
        figures = await lives.submit()
        queued = await server.usage()
        figures |= await lives.claim() | await lives.advance()
        under_way = await server.usage()
        figures |= await lives.finish()
        settled = await server.usage()
        figures |= await lives.read()
    return figures | {
        "redis_rollouts_per_second": whole_lives(figures),
        "redis_bytes_per_queued_rollout": (queued.memory_bytes - before.memory_bytes) / count,
        "redis_bytes_per_rollout_under_way": (under_way.memory_bytes - before.memory_bytes) / count,
        "redis_bytes_per_settled_rollout": (settled.memory_bytes - before.memory_bytes) / count,
        "redis_calls_per_rollout": (settled.calls - before.calls) / count,
        "redis_commands_per_rollout": (settled.commands - before.commands) / count,
        "redis_log_bytes_per_rollout": (settled.log_bytes - before.log_bytes) / count,
    }


async def measure_long(
    requests: Sequence[RolloutRequest], place: str, objects: ObjectServer | None = None
) -> dict[str, float]:
    """Return what rollouts with long trajectories take of Redis's memory and of the disk, and how long."""
    count, sample = len(requests), trajectory(LONG_TOKENS)
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as name:
        files = files_of(place, Path(name), objects)
        async with measured_redis() as server, await open_redis(server.url, files) as store:
            lives = Lives(store, requests, sample)
            before = await server.usage()
            await lives.submit()
            await lives.claim()
            await lives.advance()
            under_way = await server.usage()
            figures = await lives.finish()
            settled = await server.usage()
            alone = lives.leases[:ALONE]
            sizes = {} if files is None else await anyio.to_thread.run_sync(files.sizes)
            figures |= {
                "trajectories_per_second_c256": await rate(
                    lives.leases, lambda lease: store.trajectory(lease.rollout_id)
                ),
                "trajectory_ms_c1": 1e3
                / await rate(alone, lambda lease: store.trajectory(lease.rollout_id), callers=1),
                "files": len(sizes),
                "bytes_per_rollout_under_way": (under_way.memory_bytes - before.memory_bytes) / count,
                "bytes_per_settled_rollout": (settled.memory_bytes - before.memory_bytes) / count,
                "log_bytes_per_rollout": (settled.log_bytes - before.log_bytes) / count,
                "file_bytes_per_rollout": sum(sizes.values()) / count,
            }
    return {f"long_in_{place}_{key}": value for key, value in figures.items()}


def files_of(place: str, folder: Path, objects: ObjectServer | None) -> SegmentFiles | None:
    if objects is not None and place == "objects":
        return open_objects(objects.address(), endpoint=objects.endpoint)
    return SharedFiles(folder) if place == "folder" else None


async def open_redis(url: str, files: SegmentFiles | None = None) -> RedisStore:
    return await RedisStore.open(RedisConfig(url), is_gone=lambda _: False, files=files)


def whole_lives(figures: dict[str, float]) -> float:
    """Return how many rollouts per second go through all phases, one phase after the other."""
    phases = (
        "submits_per_second_c256",
        "claims_per_second",
        "stages_per_second_c256",
        "results_per_second_c256",
    )
    return 1 / sum(1 / figures[phase] for phase in phases)


async def main(given: Options) -> None:
    """Measure the lives of many rollouts, in both stores one after the other."""
    count = given.plan(20_000, 3_000, 60)
    requests = [
        RolloutRequest(rollout_id=f"r{number}", task=Task(environment="calc", instance={"number": number}))
        for number in range(count)
    ]
    sample = trajectory(TOKENS)
    kind = given.chosen["store"]
    figures: Figures = {}
    if kind == "s3":
        os.environ.update(keys(SERVICE))
        with object_server() as objects:
            for place in ("folder", "objects"):
                figures |= await measure_long(requests[: count // 6], place, objects)
    else:
        figures |= await measure_local(kind, requests, sample)
    settings = {"store": kind, "rollouts": count, "trajectory_bytes": len(sample.model_dump_json())}
    report("The durable store", given, settings, figures, {})


async def measure_local(kind: str, requests: Sequence[RolloutRequest], sample: Trajectory) -> dict[str, float]:
    figures = await measure_sqlite(requests, sample)
    if kind == "redis":
        sqlite = {name.removeprefix("sqlite_"): value for name, value in figures.items()}
        figures = {f"sqlite_{name}": value for name, value in sqlite.items()}
        figures |= await measure_redis(requests, sample)
        for place in ("redis", "folder"):
            figures |= await measure_long(requests[: len(requests) // 6], place)
    return figures


if __name__ == "__main__":
    run(main, "Measure how fast the durable store is.", {"store": ["sqlite", "redis", "s3"]})
