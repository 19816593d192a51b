"""Measures the CPU time of a rollout in a busy Redis, where requests share wake-ups and flushes.

Guarantees: the calls are those of the service, by its own store, with turns and a trajectory in a folder. Calls of one
store share reads and writes of a socket, those of many nodes do not, so that is measured apart.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
from support.redis_usage import MeasuredRedis

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Segment, Trajectory
from rollout_service.store import Lease
from rollout_service.store.contract import EncodedSteps, UnsavedTurn
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments.files import SharedFiles

ROLLOUTS = 1_500
AT_ONCE = 64
SOCKETS = 200
ROUNDS = 200
TURN_TOKENS = 60
OWNER = "benchmark"
_STAGES = (RolloutState.INIT, RolloutState.ROLLOUT, RolloutState.EVALUATE)


def calls_of(turns: int) -> int:
    """Return the calls of a rollout here: it is submitted, claimed, in three stages, finished, and has steps."""
    return turns + 7


async def rollout_seconds(redis: MeasuredRedis, folder: Path, *, turns: int) -> float:
    """Return the CPU time of Redis's thread for a rollout of so many turns, without those for sockets."""
    config = RedisConfig(redis.url, prefix="busy")
    async with await RedisStore.open(
        config, is_gone=lambda _: False, files=SharedFiles(folder / "busy"), owner=OWNER
    ) as store:
        await _work(store, range(AT_ONCE), turns)
        before = (await redis.usage()).cpu_seconds
        await _work(store, range(AT_ONCE, AT_ONCE + ROLLOUTS), turns)
        return ((await redis.usage()).cpu_seconds - before) / ROLLOUTS


async def request_seconds(redis: MeasuredRedis) -> float:
    """Return the CPU time of Redis's thread for a request that has a socket of its own, of many that come at once."""
    before = (await redis.usage()).cpu_seconds
    await anyio.to_thread.run_sync(_ask, redis.url.removeprefix("unix://"))
    return ((await redis.usage()).cpu_seconds - before) / (SOCKETS * ROUNDS)


def _ask(path: str) -> None:
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(SOCKETS)]
    try:
        for one in sockets:
            one.connect(path)
        for _ in range(ROUNDS):
            for one in sockets:
                one.sendall(b"PING\r\n")
            for one in sockets:
                if one.recv(64) != b"+PONG\r\n":
                    raise SystemExit("Redis did not answer a PING")
    finally:
        for one in sockets:
            one.close()


async def _work(store: RedisStore, numbers: Sequence[int], turns: int) -> None:
    made = _trajectory(turns)
    limit = anyio.CapacityLimiter(AT_ONCE)

    async def work(number: int) -> None:
        async with limit:
            task = Task(environment="echo", instance={"number": number})
            await store.submit(RolloutRequest(rollout_id=f"busy-{number}", task=task))
            [lease] = await store.claim(OWNER, limit=1, lease_seconds=600)
            await _finish(store, lease, made, turns)

    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(work, number)


async def _finish(store: RedisStore, lease: Lease, made: Trajectory, turns: int) -> None:
    for stage in _STAGES[:2]:
        await store.advance(lease, OWNER, stage)
    for number in range(turns):
        data = random.randbytes(12 * TURN_TOKENS)
        await store.save_turns(OWNER, [UnsavedTurn(lease.rollout_id, lease.token, number, data)])
    await store.advance(lease, OWNER, _STAGES[2])
    await store.save_steps([EncodedSteps(lease.rollout_id, random.randbytes(1_000))])
    result = Rollout(
        rollout_id=lease.rollout_id,
        task=lease.request.task,
        pool=lease.request.pool,
        state=RolloutState.COMPLETED,
        attempt=lease.attempt,
        created_at=lease.created_at,
        reward=1.0,
        trajectory=made,
    )
    if not await store.finish(lease, OWNER, result):
        raise SystemExit(f"the lease of {lease.rollout_id} was lost")


def _trajectory(turns: int) -> Trajectory:
    draw = random.Random(0)
    tokens = turns * TURN_TOKENS
    segment = Segment(
        token_ids=[draw.randrange(150_000) for _ in range(tokens)],
        loss_mask=[1] * tokens,
        logprobs=[-draw.random() for _ in range(tokens)],
        versions=[0] * tokens,
        turn_ids=[number // TURN_TOKENS for number in range(tokens)],
        fork_reason=ForkReason.FIRST,
    )
    return Trajectory(
        segments=[segment],
        messages=[],
        finish_reasons=[FinishReason.STOP] * turns,
        fork_counts={ForkReason.FIRST: 1},
    )
