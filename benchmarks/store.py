"""Measure the durable store: submits, claims, stages, results, and reads per second, with 256 callers at once.

Run: python benchmarks/store.py [--json FILE] [--quick]

Every write is on the disk before it counts; results carry a trajectory of about 5 KB of JSON. The store's file is in
the folder for temporary files: set TMPDIR to a folder on the disk to measure.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
from common import Options, report, run

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_service.store import Lease
from rollout_service.store.sqlite import SqliteStore

T = TypeVar("T")

CALLERS = 256
OWNER = "benchmark"
TOKENS = 150


def trajectory() -> Trajectory:
    """Make a trajectory of about 5 KB of JSON."""
    draw = random.Random(0)
    segment = Segment(
        token_ids=[draw.randrange(150_000) for _ in range(TOKENS)],
        loss_mask=[1] * TOKENS,
        logprobs=[-draw.random() for _ in range(TOKENS)],
        versions=[0] * TOKENS,
        turn_ids=[0] * TOKENS,
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


async def main(given: Options) -> None:
    """Measure the lives of many rollouts."""
    count = 3_000 if given.quick else 20_000
    requests = [
        RolloutRequest(rollout_id=f"r{number}", task=Task(environment="calc", instance={"number": number}))
        for number in range(count)
    ]
    leases: list[Lease] = []
    sample = trajectory()

    async def finish(store: SqliteStore, lease: Lease) -> None:
        result = Rollout(
            rollout_id=lease.rollout_id,
            state=RolloutState.COMPLETED,
            task=lease.request.task,
            pool=lease.request.pool,
            reward=1.0,
            created_at=lease.created_at,
            trajectory=sample,
        )
        if not await store.finish(lease, OWNER, result):
            raise RuntimeError("a lease was lost")

    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as folder:
        async with await SqliteStore.open(Path(folder) / "store.sqlite3") as store:
            figures: dict[str, float | int | None] = {
                "submits_per_second_c1": await rate(requests[:200], store.submit, 1),
                "submits_per_second_c256": await rate(requests[200:], store.submit),
            }
            started = time.perf_counter()
            while batch := await store.claim(OWNER, limit=32, lease_seconds=600):
                leases += batch
            figures["claims_per_second"] = count / (time.perf_counter() - started)
            figures["stages_per_second_c256"] = await rate(
                leases, lambda lease: store.advance(lease, OWNER, RolloutState.ROLLOUT)
            )
            figures["results_per_second_c256"] = await rate(leases, lambda lease: finish(store, lease))
            figures["reads_per_second_c256"] = await rate(leases, lambda lease: store.get(lease.rollout_id))
    settings = {"rollouts": count, "trajectory_bytes": len(sample.model_dump_json())}
    report("The durable store", given, settings, figures, {})


if __name__ == "__main__":
    run(main, "Measure how fast the durable store is.")
