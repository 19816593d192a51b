"""Fill a Redis with the rollouts of the benchmark of lists, as an earlier release left them: without an index.

What is written is what the searches read: the rollouts without their requests and results, the bounds of each run, and
the members of some groups. The service that starts then makes the index, which is measured, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import redis.asyncio
from support.dashboard.layout import GROUP_SIZE, Layout, Member, alone, layout, row
from support.redis_usage import MeasuredRedis, measured_redis

from rollout_service.store.redis import RedisConfig
from rollout_service.store.redis.runs.keys import RunKeys
from rollout_service.store.redis.runs.records import ClosedRecord

INDEX_SECONDS = 600.0
_AT_ONCE = 2_000
_NAMES = ("e", "R", "G", "s", "w", "S", "k", "C", "Q", "H", "T", "N", "W")
"""The fields of a rollout in the order of a row, as `rollouts.lua` names them."""
_CLOSED = 100
SETTINGS = "service.toml"
"""The name of the settings file in the state folder."""


@asynccontextmanager
async def filled_redis(rollouts: int, state_dir: Path) -> AsyncIterator[MeasuredRedis]:
    """Run a Redis with so many rollouts, and write the settings of a service that uses it to the state folder."""
    async with measured_redis() as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.config_set("appendonly", "no")
            await _fill(client, RedisConfig(server.url).root, rollouts)
        settings = f'[store]\nurl = "{server.url}"\nredis_durability = "relaxed"\n'
        await anyio.Path(state_dir / SETTINGS).write_text(settings)
        yield server


async def measure_index(server: MeasuredRedis, bytes_before: int) -> Mapping[str, float]:
    """Wait until the service has made the index; return the time, and the memory that it takes for each rollout."""
    begun, root = time.perf_counter(), RedisConfig(server.url).root
    async with redis.asyncio.Redis.from_url(server.url) as client:
        with anyio.fail_after(INDEX_SECONDS):
            while not await _is_whole(client, root):  # noqa: ASYNC110 - another process cannot set an event
                await anyio.sleep(0.05)
        last = int(await client.get(f"{root}:rollouts:last"))
    grown = (await server.usage()).memory_bytes - bytes_before
    return {"list_index_seconds": time.perf_counter() - begun, "list_index_bytes_per_rollout": grown / last}


async def _is_whole(client: redis.asyncio.Redis, root: str) -> bool:
    form, after = await client.hmget(f"{root}:index", "form", "after")
    return form is not None and after is None


async def _fill(client: redis.asyncio.Redis, root: str, rollouts: int) -> None:
    await client.hset(f"{root}:meta", mapping={"application": "rollout-service", "version": 1})
    for run in layout(rollouts):
        await _write(client, root, run.members(), run.name)
        last = run.first + run.groups * GROUP_SIZE - 1
        bounds = {"state": "ended", "rollouts_after": run.first - 1, "rollouts_until": last}
        await client.hset(RunKeys(root, run.name).run, mapping=bounds)
        await client.hset(RunKeys(root, run.name).closed, mapping=_closed(run))
    await _write(client, root, alone(rollouts), None)
    await client.set(f"{root}:rollouts:last", rollouts)


async def _write(client: redis.asyncio.Redis, root: str, members: Iterable[Member], run: str | None) -> None:
    pipeline = client.pipeline(transaction=False)
    for number, member in enumerate(members, start=1):
        seq, name, environment, _, group, *rest = row(member)
        given = dict(zip(_NAMES, (environment, run, group, *rest), strict=True))
        fields = {field: value for field, value in given.items() if value is not None}
        pipeline.hset(
            f"{root}:r:{name}", mapping={"n": seq, "a": 1, "t": 1, "f": "0", "p": "policy", **fields}
        )
        pipeline.zadd(f"{root}:state:{given['s']}", {name: seq})
        if number % _AT_ONCE == 0:
            await pipeline.execute()
            sys.stderr.write(f"\r{seq:,} rollouts ")
    await pipeline.execute()


def _closed(run: Layout) -> dict[int, bytes]:
    """Return the records of the first groups of a run."""
    records = {}
    for number in range(min(run.groups, _CLOSED)):
        ids = [f"{run.name}.{number}.{sample}" for sample in range(GROUP_SIZE)]
        records[number] = ClosedRecord(0, ids, [], [], "[]", "{}", 0, 0.0).encode()
    return records
