"""Fill a Redis with the rollouts of the benchmark of lists.

What is written is what searches and deletions read: the index, the rollouts without their requests and results, the
runs, and the members of their groups, of the long run only some.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from importlib import resources
from itertools import islice
from pathlib import Path

import anyio
import redis.asyncio
from pydantic_core import to_json
from rollout_service.store.redis.runs.rollouts import RunKeys
from support.dashboard.layout import GROUP_SIZE, LONG, START, Layout, Member, alone, layout, row
from support.redis_usage import MeasuredRedis, measured_redis

from api_schemas.runs import InlineTasks, RunRequest, RunState
from rollout_service.settings import RetentionSettings
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.redis.config import Durability
from rollout_service.store.redis.runs.records import ClosedRecord

_AT_ONCE = 500
_NAMES = ("e", "R", "G", "s", "w", "S", "k", "C", "Q", "H", "T", "N", "W")
"""The fields of a rollout in the order of a row, as `rollouts.lua` names them."""
_CLOSED = 100
"""The groups of the long run that have their members."""
DELETED = 100_000
"""The most that are deleted."""
_ENTER = """
common.register('enter', function(call, packed)
    for _, given in ipairs(cjson.decode(packed)) do
        local number, id, fields, written = given.n, given.id, given.fields, {}
        local key = call:key('r:' .. id)
        redis.call('HSET', key, 'n', number)
        index.enter(call, id, number, fields.e, fields.R)
        index.enter_outcome(call, id, fields.k, fields.w)
        for name, value in pairs(fields) do
            table.insert(written, name)
            table.insert(written, value)
        end
        redis.call('HSET', key, 'a', 1, 't', 1, 'f', '0', 'p', 'policy', unpack(written))
        redis.call('ZADD', call:key('state:' .. fields.s), number, id)
        if not fields.R then
            redis.call('RPUSH', call:key('ended'), id)
        end
    end
end)
"""
"""Writes rollouts, and enters each into the index as the store does, before the rollout is written."""
SETTINGS = "service.toml"
"""The name of the settings file in the state folder."""


@asynccontextmanager
async def filled_redis(rollouts: int, state_dir: Path) -> AsyncIterator[MeasuredRedis]:
    """Run a Redis with so many rollouts, and write the settings of a service that uses it to the state folder."""
    async with measured_redis() as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.config_set("appendonly", "no")
            async with _opened(server) as store:
                for run in layout(rollouts):
                    source = InlineTasks(open=True, tasks=[])
                    request = RunRequest(run_id=run.name, source=source, batch_size=8, group_size=GROUP_SIZE)
                    await store.runs.create(request, tasks=0, digest=None, version=0)
                    await store.runs.update(run.name, state=RunState.ENDED)
            await _fill(client, RedisConfig(server.url).root, rollouts)
        settings = f'[store]\nurl = "{server.url}"\nredis_durability = "relaxed"\n'
        await anyio.Path(state_dir / SETTINGS).write_text(settings)
        yield server


async def delete_expired(server: MeasuredRedis) -> int:
    """Delete runs and rollouts as retention does, some of them; return how many groups, runs and rollouts."""
    total = 0
    async with _opened(server) as store:
        keep = RetentionSettings(ended_run_seconds=0, settled_group_seconds=0, rollout_seconds=0)
        while total < DELETED and (deleted := await store.runs.delete_expired(keep)):
            total += deleted
    return total


@asynccontextmanager
async def _opened(server: MeasuredRedis) -> AsyncIterator[RedisStore]:
    config = RedisConfig(server.url, durability=Durability.RELAXED)
    async with await RedisStore.open(config, is_gone=lambda _: False) as store:
        yield store


async def _fill(client: redis.asyncio.Redis, root: str, rollouts: int) -> None:
    await client.function_load(_library())
    for run in layout(rollouts):
        await _write(client, root, run.members(), run.name)
        last = run.first + run.groups * GROUP_SIZE - 1
        keys = RunKeys(root, run.name)
        bounds = {"rollouts_after": run.first - 1, "rollouts_until": last}
        await client.hset(keys.run, mapping=bounds)
        for records in _closed(run):
            await client.hset(keys.closed, mapping=records)
            if run.name != LONG:
                await client.zadd(keys.settled, {number: START + number for number in records})
    await _write(client, root, alone(rollouts), None)
    await client.set(f"{root}:rollouts:last", rollouts)


def _library() -> str:
    folder = resources.files("rollout_service.store.redis") / "lua"
    body = "\n".join((folder / f"{name}.lua").read_text() for name in ("common", "index"))
    return f"#!lua name=fill\nlocal SUFFIX = '_fill'\n{body}{_ENTER}"


async def _write(client: redis.asyncio.Redis, root: str, members: Iterable[Member], run: str | None) -> None:
    waiting = iter(members)
    while some := list(islice(waiting, _AT_ONCE)):
        rollouts = []
        for member in some:
            seq, name, environment, _, group, *rest = row(member)
            fields = zip(_NAMES, (environment, run, group, *rest), strict=True)
            known = {field: str(value) for field, value in fields if value is not None}
            rollouts.append({"n": seq, "id": name, "fields": known})
        await client.fcall("enter_fill", 1, root, "", to_json(rollouts).decode())
        sys.stderr.write(f"\r{some[-1][0]:,} rollouts ")


def _closed(run: Layout) -> Iterator[dict[int, bytes]]:
    """Yield the records of groups by their numbers, some at a time."""
    groups = min(run.groups, _CLOSED) if run.name == LONG else run.groups
    for first in range(0, groups, _AT_ONCE):
        records = {}
        for number in range(first, min(groups, first + _AT_ONCE)):
            ids = [f"{run.name}.{number}.{sample}" for sample in range(GROUP_SIZE)]
            records[number] = ClosedRecord(0, ids, [], [], "[]", "{}", 0, 0.0).encode()
        yield records
