"""Fill a Redis with the rollouts of the benchmark of lists.

What is written is what the searches read: the index, the rollouts without their requests and results, the bounds of
each run, and the members of some groups.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import anyio
import redis.asyncio
from support.dashboard.layout import GROUP_SIZE, Layout, Member, alone, layout, row
from support.redis_usage import MeasuredRedis, measured_redis

from rollout_service.store.redis import RedisConfig
from rollout_service.store.redis.runs.records import ClosedRecord
from rollout_service.store.redis.runs.rollouts import RunKeys

_AT_ONCE = 2_000
_NAMES = ("e", "R", "G", "s", "w", "S", "k", "C", "Q", "H", "T", "N", "W")
"""The fields of a rollout in the order of a row, as `rollouts.lua` names them."""
_CLOSED = 100
_ENTER = """
common.register('enter', function(call, id, number, environment, run, code, reward)
    redis.call('HSET', call:key('r:' .. id), 'n', number)
    index.enter(call, id, tonumber(number), environment, run ~= '' and run or nil)
    index.enter_outcome(call, id, code ~= '' and code or nil, reward ~= '' and reward or nil)
end)
"""
"""Enters a rollout into the index as the store does, before the rollout is written."""
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


async def _fill(client: redis.asyncio.Redis, root: str, rollouts: int) -> None:
    await client.function_load(_library())
    await client.hset(f"{root}:meta", mapping={"application": "rollout-service", "version": 1})
    for run in layout(rollouts):
        await _write(client, root, run.members(), run.name)
        last = run.first + run.groups * GROUP_SIZE - 1
        bounds = {"state": "ended", "rollouts_after": run.first - 1, "rollouts_until": last}
        await client.hset(RunKeys(root, run.name).run, mapping=bounds)
        await client.hset(RunKeys(root, run.name).closed, mapping=_closed(run))
    await _write(client, root, alone(rollouts), None)
    await client.set(f"{root}:rollouts:last", rollouts)


def _library() -> str:
    folder = resources.files("rollout_service.store.redis") / "lua"
    body = "\n".join((folder / f"{name}.lua").read_text() for name in ("common", "index"))
    return f"#!lua name=fill\nlocal SUFFIX = '_fill'\n{body}{_ENTER}"


async def _write(client: redis.asyncio.Redis, root: str, members: Iterable[Member], run: str | None) -> None:
    pipeline = client.pipeline(transaction=False)
    for number, member in enumerate(members, start=1):
        seq, name, environment, _, group, *rest = row(member)
        given = dict(zip(_NAMES, (environment, run, group, *rest), strict=True))
        fields = {field: value for field, value in given.items() if value is not None}
        entered = [given[field] for field in ("e", "R", "k", "w")]
        known = ["" if value is None else value for value in (name, seq, *entered)]
        pipeline.fcall("enter_fill", 1, root, "", *known)
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
