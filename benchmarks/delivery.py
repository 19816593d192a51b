"""Measure the delivery of a batch of 256 trajectories of 32,000 tokens, as arrays and as JSON.

Run: python benchmarks/delivery.py [--json FILE] [--quick | --smoke]

The batch is put into a store, a service is started on it, and the client leases it in both forms. The yardstick is the
same bytes as a static file, from the same HTTP server, through the same client, into the same arrays. It takes the same
kinds of work as delivery and scales with it, unlike the speed of a disk, which differs several times between machines
of one kind. Each lease is paired with a download of the file, alternately first and second; the ratio is the median
over the pairs.

- `binary_vs_http`: seconds from the lease to a batch that is ready for training, over those of the static file;
- `json_vs_http`: the same for JSON; `disk_seconds`: the time to write the arrays to a file, until they are on disk;
- `peak_mb`: the peak memory (10^6 bytes) of the service's process; `binary_mb`: the size of the arrays.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import numpy as np
from common import HERE, Figures, Options, report, run, scripted_engine, service, temporary_folder, told_address

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Segment, Trajectory
from rollout_client._download import LargeBody
from rollout_client.arrays import BatchArrays
from rollout_client.client import ClientRun, RolloutClient
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, NewGroup
from rollout_service.store.sqlite import SqliteStore

RUN_ID = "delivery"
SAMPLES = 8
JSON_ROUNDS = 3
SECONDS = 60.0
TURNS = 16
VOCABULARY = 150_000
ENVIRONMENT = HERE / "environments" / "echo"


@dataclass(frozen=True, slots=True)
class Plan:
    """The batch, and how often it is delivered."""

    groups: int
    tokens: int
    rounds: int


FULL = Plan(groups=32, tokens=32_000, rounds=15)
QUICK = Plan(groups=32, tokens=32_000, rounds=7)
SMOKE = Plan(groups=2, tokens=1_000, rounds=1)


def trajectory(draw: np.random.Generator, tokens: int) -> Trajectory:
    """Make a trajectory of alternating tool and sampled tokens, with log-probabilities like an engine's."""
    turn = np.arange(tokens) * TURNS // tokens
    sampled = (np.arange(tokens) * TURNS * 2 // tokens) % 2 == 1
    logprobs = np.where(sampled, -draw.exponential(0.3, tokens), 0.0).astype("<f4")
    segment = Segment(
        token_ids=draw.integers(0, VOCABULARY, tokens).tolist(),
        loss_mask=sampled.astype(int).tolist(),
        logprobs=logprobs.astype(float).tolist(),
        versions=np.where(sampled, 7, -1).tolist(),
        turn_ids=np.where(sampled, turn, -1).tolist(),
        fork_reason=ForkReason.FIRST,
    )
    return Trajectory(
        segments=[segment],
        messages=[],
        finish_reasons=[FinishReason.STOP] * TURNS,
        fork_counts={ForkReason.FIRST: 1},
    )


async def fill(database: Path, plan: Plan) -> None:
    """Fill a store with a run whose groups are all ready."""
    draw = np.random.default_rng(0)
    tasks = [Task(environment="math", instance={"question": "1", "answer": "1"})] * plan.groups
    order = RunRequest(
        run_id=RUN_ID,
        source=InlineTasks(tasks=tasks),
        group_size=SAMPLES,
        batch_size=plan.groups,
        filters=[],
        infrastructure_retries=0,
    )
    async with await SqliteStore.open(database) as store:
        await store.runs.create(order, tasks=plan.groups, digest=None, version=0)
        for number in range(plan.groups):
            ids = [f"{RUN_ID}.{number}.{sample}" for sample in range(SAMPLES)]
            requests = [RolloutRequest(rollout_id=one, task=tasks[number]) for one in ids]
            await store.runs.start_groups(RUN_ID, [NewGroup(number, 0, requests)])
            for lease in await store.claim("fill", limit=SAMPLES, lease_seconds=600):
                result = Rollout(
                    rollout_id=lease.rollout_id,
                    state=RolloutState.COMPLETED,
                    task=lease.request.task,
                    pool="policy",
                    reward=0.0,
                    created_at=lease.created_at,
                    trajectory=trajectory(draw, plan.tokens),
                )
                await store.finish(lease, "fill", result)
            samples = [ClosedSample(n, one, True, None, 0.0, None) for n, one in enumerate(ids)]
            await store.runs.close_group(RUN_ID, GroupClosure(number, None, samples, 0.0, 0.0, 7, 7))


async def timed_lease(run_of: ClientRun, *, arrays: bool) -> tuple[float, bytes | bytearray]:
    """Return the seconds until the batch and its arrays are read, and its content; the batch is returned."""
    started = time.perf_counter()
    leased = await run_of.lease(arrays=arrays)
    if leased is None:
        raise RuntimeError("there is no batch")
    seconds = time.perf_counter() - started
    content = leased.content
    await leased.nack()
    return seconds, content


async def timed_file(url: str) -> float:
    """Return the seconds until the arrays of the static file are read."""
    request = httpx.Request("GET", url)
    context = httpx.create_ssl_context()
    body = LargeBody()
    started = time.perf_counter()
    await body.fetch(request, connect_seconds=SECONDS, seconds=SECONDS, context=context)
    BatchArrays.from_bytes(body.content)
    return time.perf_counter() - started


async def pair(run_of: ClientRun, url: str, *, lease_first: bool) -> tuple[float, float]:
    """Return the seconds of a lease and of the file, one after the other."""
    if lease_first:
        seconds, _ = await timed_lease(run_of, arrays=True)
        return seconds, await timed_file(url)
    file_seconds = await timed_file(url)
    return (await timed_lease(run_of, arrays=True))[0], file_seconds


def written(path: Path, content: bytes | bytearray) -> float:
    """Return the seconds to write bytes to a new file, until they are on disk."""
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def peak_mb(pid: int) -> float:
    """Return a process's peak resident memory, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return kib * 1024 / 1e6


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    with temporary_folder() as folder:
        await fill(folder / "rollouts.sqlite3", plan)
        async with (
            scripted_engine(folder / "engine.address") as url,
            service(folder, url, workers=1, environment=ENVIRONMENT) as server,
        ):
            figures = await measure(server.client, server.process.pid, folder, plan.rounds)
    aims = {"binary_vs_http": "<= 1.3"}
    report(
        "Delivering a batch",
        given,
        {"trajectories": plan.groups * SAMPLES, "tokens": plan.tokens, "rounds": plan.rounds},
        figures,
        aims,
    )


async def measure(client: RolloutClient, pid: int, folder: Path, rounds: int) -> Figures:
    run_of = client.open_run(RUN_ID)
    before = peak_mb(pid)
    _, content = await timed_lease(run_of, arrays=True)
    disk_seconds = await anyio.to_thread.run_sync(written, folder / "arrays", content)
    (folder / "batch").write_bytes(content)
    server = [str(HERE / "programs" / "static_file.py"), str(folder / "batch")]
    async with told_address(server, folder / "file.address") as url:
        await pair(run_of, url, lease_first=True)
        pairs = [await pair(run_of, url, lease_first=number % 2 == 0) for number in range(rounds)]
    after_binary = peak_mb(pid)
    as_json = [(await timed_lease(run_of, arrays=False))[0] for _ in range(JSON_ROUNDS)]
    binary_seconds, http_seconds = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "binary_vs_http": statistics.median(lease / file for lease, file in pairs),
        "json_vs_http": statistics.median(as_json) / http_seconds,
        "peak_mb": peak_mb(pid),
        "peak_after_binary_mb": after_binary,
        "peak_before_mb": before,
        "binary_mb": len(content) / 1e6,
        "binary_seconds": binary_seconds,
        "http_seconds": http_seconds,
        "json_seconds": statistics.median(as_json),
        "disk_seconds": disk_seconds,
    }


if __name__ == "__main__":
    run(main, __doc__ or "")
