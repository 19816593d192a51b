"""The index of rollouts in Redis forgets what is deleted, and finds any reward in order."""

import pytest

from api_schemas.rollouts import RolloutState
from api_schemas.views.summaries import SummaryFilter
from rollout_service.store.redis import RedisStore
from rollout_service.store.redis import lists as index
from tests.support.redis_server import RedisServer
from tests.support.store.rollouts import ended, order
from tests.support.store.servers import redis_store

pytestmark = pytest.mark.redis

REWARDS = [-1e300, -2.5, -1.0, -1e-300, 0.0, 1e-300, 0.1, 0.8749999999999999, 0.875, 1.0, 600.0, 5e4, 1e300]
BITS = index.CHUNK


async def end(store: RedisStore, rollout_id: str, *, reward: float | None, environment: str = "calc") -> None:
    """Run a rollout to its end, with a reward or an error."""
    await store.submit(order(rollout_id, environment))
    (lease,) = await store.claim("w", limit=1, lease_seconds=100)
    state = RolloutState.FAILED if reward is None else RolloutState.COMPLETED
    assert await store.finish(lease, "w", ended(lease, state, reward=reward))


async def found(store: RedisStore, which: SummaryFilter) -> list[str]:
    """Return the ids of a search, which one page has."""
    page = await store.summaries(which, order="oldest")
    assert page.next_cursor is None
    return [row.rollout_id for row in page.rows]


def keys(server: RedisServer, root: str, *names: str) -> set[str]:
    """Return the names of the keys of the index."""
    every = {key.decode().removeprefix(f"{root}:") for key in server.do("KEYS", "*") if key.decode().startswith(root)}
    return {key for key in every if key.startswith(names or ("bits:", "ids"))}


async def test_the_index_has_nothing_of_rollouts_that_are_deleted(shared_redis):
    config = shared_redis.config()
    async with redis_store(config) as store:
        for number, reward in enumerate([*REWARDS, None]):
            await end(store, f"r{number}", reward=reward, environment=f"env-{number % 3}")
        assert {"ids", "bits:e", "bits:w", "bits:k", "bits:e:env-0:0"} <= keys(shared_redis, config.root)
        assert await found(store, SummaryFilter(error="engine_gone")) == [f"r{len(REWARDS)}"]
        while await store.delete_expired(0):
            continue
        assert keys(shared_redis, config.root) == set()


async def test_a_reward_of_any_size_is_found(shared_redis):
    async with redis_store(shared_redis.config()) as store:
        for number, reward in enumerate(REWARDS):
            await end(store, f"r{number}", reward=reward)
        for low in REWARDS:
            for high in REWARDS:
                expected = [f"r{number}" for number, reward in enumerate(REWARDS) if low <= reward <= high]
                assert await found(store, SummaryFilter(reward_min=low, reward_max=high)) == expected


async def test_rollouts_in_many_chunks_come_in_order(shared_redis, monkeypatch):
    monkeypatch.setattr(index, "CHUNKS_AT_ONCE", 2)
    config = shared_redis.config()
    async with redis_store(config) as store:
        every = []
        for chunk in (0, 0, 1, 2, 5, 6):
            last = max(int(shared_redis.do("GET", f"{config.root}:rollouts:last") or 0), chunk * BITS - 1)
            shared_redis.do("SET", f"{config.root}:rollouts:last", last)
            for _ in range(3):
                every.append(f"r{len(every)}")
                await end(store, every[-1], reward=0.5)
        which = SummaryFilter(environment="calc", reward_min=0.5)
        assert await found(store, which) == every
        ids, cursor = [], None
        while page := await store.summaries(which, limit=4, cursor=cursor):
            ids += [row.rollout_id for row in page.rows]
            if (cursor := page.next_cursor) is None:
                break
        assert ids == every[::-1]
