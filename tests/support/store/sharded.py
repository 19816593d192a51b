"""A store of two shards in two real Redis, or at two slots of a cluster of Redis."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from heapq import merge
from itertools import count, islice
from typing import Any

from api_schemas.events import Event
from rollout_service.base.signals import first_of
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig
from rollout_service.store.sharded import ShardedStore
from rollout_service.store.sharded.store import shard_of
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

SHARDS = 2


def shard_configs(*servers: RedisServer | RedisCluster) -> list[RedisConfig]:
    """Return the configurations of new shards, as many as there are servers."""
    first = servers[0].config()
    return [
        replace(server.config(first.prefix), shard=number, shards=len(servers)) for number, server in enumerate(servers)
    ]


def names_of_shard(shard: int, number: int, prefix: str = "r") -> list[str]:
    """Return names of rollouts or runs that one of the shards keeps."""
    every = (f"{prefix}{each}" for each in count())
    return list(islice((name for name in every if shard_of(name, SHARDS) == shard), number))


class ShardsInOneLog(ShardedStore):
    """A store of shards whose events are read as if there were one log of them, as the contract's checks do."""

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        home, *others = [await shard.events(after=0, limit=100_000) for shard in self.shards]
        # Each shard tells of each node.
        logs = [home, *([one for one in log if not one.kind.startswith("node.")] for log in others)]
        merged = enumerate(merge(*logs, key=lambda event: event.time), 1)
        found = [event.model_copy(update={"event_id": number}) for number, event in merged]
        return found[after : after + limit]

    async def last_event(self) -> int:
        return sum([await shard.last_event() for shard in self.shards])

    async def wait_for_events(self, *, after: int) -> int:
        while sum(seen := [await shard.last_event() for shard in self.shards]) == after:
            await first_of(*(waits(shard, last) for shard, last in zip(self.shards, seen, strict=True)))
        return sum(seen)


def waits(shard: Any, last: int) -> Callable[[], Any]:
    """Return a wait for the next event of a shard."""
    return lambda: shard.wait_for_events(after=last)


@asynccontextmanager
async def opened_shards(
    configs: Sequence[RedisConfig], *, is_gone: Callable[[str], bool] = is_gone, **options: Any
) -> AsyncIterator[ShardsInOneLog]:
    async with ShardsInOneLog.opened(configs, is_gone=is_gone, **options) as store:
        assert isinstance(store, ShardsInOneLog)
        yield store
