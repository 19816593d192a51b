"""The membership and leadership of a Redis without the rest of its store, at times that a test chooses."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from api_schemas.events import Event
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.redis import RedisConfig, RedisConnection
from rollout_service.store.redis.rollouts import event_row
from rollout_service.store.redis.store import RedisCluster


class RedisMembers:
    """The members of a Redis, with its events as they come."""

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection
        self.cluster = RedisCluster(connection)

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        found = await self.connection.command("XRANGE", self.connection.key("events"), "-", "+")
        whole = [codec.decode_event(event_row(entry)) for entry in found]
        return [event for event in whole if event.event_id > after][:limit]


@asynccontextmanager
async def redis_members(config: RedisConfig, clock: Callable[[], float] | None = None) -> AsyncIterator[RedisMembers]:
    connection = await RedisConnection.open(config, clock=clock)
    try:
        yield RedisMembers(connection)
    finally:
        await connection.close()
