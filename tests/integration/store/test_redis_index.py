"""The index of rollouts in Redis forgets what is deleted, gets what is older, and notices what others did."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.views.summaries import SummaryFilter
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.redis import lists as index
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.redis]

REWARDS = [-1e300, -2.5, -1.0, -1e-300, 0.0, 1e-300, 0.1, 0.8749999999999999, 0.875, 1.0, 600.0, 5e4, 1e300]
BITS = index.CHUNK


@asynccontextmanager
async def opened(config: RedisConfig) -> AsyncIterator[RedisStore]:
    async with await RedisStore.open(config, is_gone=is_gone) as store:
        yield store


async def end(store: RedisStore, rollout_id: str, *, reward: float | None, environment: str = "calc") -> None:
    """Run a rollout to its end, with a reward or an error."""
    task = Task(environment=environment, instance={})
    await store.submit(RolloutRequest(rollout_id=rollout_id, task=task))
    (lease,) = await store.claim("w", limit=1, lease_seconds=100)
    gone = ErrorInfo(code="engine_gone", boundary=Boundary.INFERENCE, message="gone", retryable=True)
    state = RolloutState.FAILED if reward is None else RolloutState.COMPLETED
    error = gone if reward is None else None
    result = Rollout(
        rollout_id=rollout_id,
        state=state,
        task=task,
        pool="policy",
        reward=reward,
        error=error,
        created_at=lease.created_at,
    )
    assert await store.finish(lease, "w", result)


async def found(store: RedisStore, which: SummaryFilter) -> list[str]:
    """Return the ids of a search, which one page has."""
    page = await store.summaries(which, order="oldest")
    assert page.next_cursor is None
    return [row.rollout_id for row in page.rows]


def keys(server: RedisServer, root: str, *names: str) -> set[str]:
    """Return the names of the keys of the index."""
    every = {
        key.decode().removeprefix(f"{root}:")
        for key in server.do("KEYS", "*")
        if key.decode().startswith(root)
    }
    return {key for key in every if key.startswith(names or ("bits:", "ids"))}


def as_if_older(server: RedisServer, root: str, names: Sequence[str]) -> None:
    """Write rollouts as a release without the index did."""
    for name in names:
        number = server.do("INCR", f"{root}:rollouts:last")
        fields = {
            "n": number,
            "s": "cancelled",
            "a": 0,
            "t": 0,
            "p": "policy",
            "e": "old",
            "C": 1,
            "Q": 1,
            "H": 1,
        }
        server.do("HSET", f"{root}:r:{name}", *(value for pair in fields.items() for value in pair))
        server.do("ZADD", f"{root}:state:cancelled", number, name)
        ((last, _),) = server.do("XREVRANGE", f"{root}:events", "+", "-", "COUNT", 1) or [(b"0-0", [])]
        event = int(last.split(b"-")[0]) + 1
        said = ("k", "rollout.state", "s", name, "t", time.time(), "d", '{"state":"cancelled","attempt":0}')
        server.do("XADD", f"{root}:events", f"{event}-0", *said)


async def test_the_index_has_nothing_of_rollouts_that_are_deleted(shared_redis: RedisServer) -> None:
    config = shared_redis.config()
    async with opened(config) as store:
        for number, reward in enumerate([*REWARDS, None]):
            await end(store, f"r{number}", reward=reward, environment=f"env-{number % 3}")
        assert {"ids", "bits:e", "bits:w", "bits:k", "bits:e:env-0:0"} <= keys(shared_redis, config.root)
        assert await found(store, SummaryFilter(error="engine_gone")) == [f"r{len(REWARDS)}"]
        while await store.delete_expired(0):
            continue
        assert keys(shared_redis, config.root) == set()


async def test_a_reward_of_any_size_is_found(shared_redis: RedisServer) -> None:
    async with opened(shared_redis.config()) as store:
        for number, reward in enumerate(REWARDS):
            await end(store, f"r{number}", reward=reward)
        for low in REWARDS:
            for high in REWARDS:
                expected = [f"r{number}" for number, reward in enumerate(REWARDS) if low <= reward <= high]
                assert await found(store, SummaryFilter(reward_min=low, reward_max=high)) == expected


async def test_rollouts_in_many_chunks_come_in_order(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "CHUNKS_AT_ONCE", 2)
    config = shared_redis.config()
    async with opened(config) as store:
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


async def test_what_an_earlier_release_left_is_indexed_across_a_crash(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "ENTERED_AT_ONCE", 3)
    config = shared_redis.config()
    names = [f"old-{number}" for number in range(10)]
    shared_redis.do("HSET", f"{config.root}:meta", "application", "rollout-service", "version", 1)
    as_if_older(shared_redis, config.root, names)
    async with opened(config) as store:
        assert await found(store, SummaryFilter(environment="old")) == names
        for _ in range(2):
            await store.connection.call("lists_index", 3)  # and then the service is gone
    assert shared_redis.do("HGET", f"{config.root}:index", "after") == b"6"
    async with opened(config) as store:
        await end(store, "new", reward=0.5)
        assert await found(store, SummaryFilter(text="old-")) == names
        assert await store.connection.call("lists_index", 3) == [0, b"9", b"11"]
        await store.collect_garbage()
        assert shared_redis.do("HGET", f"{config.root}:index", "after") is None
        assert shared_redis.do("HGETALL", f"{config.root}:bits:e") == {b"old": b"10", b"calc": b"1"}
        assert await found(store, SummaryFilter(environment="old")) == names
        assert await found(store, SummaryFilter(text="old-")) == names
        assert await found(store, SummaryFilter(reward_min=0.1)) == ["new"]


async def test_what_an_earlier_release_writes_beside_this_one_is_found(shared_redis: RedisServer) -> None:
    config = shared_redis.config()
    async with opened(config) as store:
        await end(store, "new", reward=0.5)
        as_if_older(shared_redis, config.root, ["old-1"])
        assert await found(store, SummaryFilter(environment="old")) == ["old-1"], "the index is not believed"
        await end(store, "newer", reward=0.5)
        assert await found(store, SummaryFilter(environment="old")) == ["old-1"]
        await store.collect_garbage()
        assert shared_redis.do("HGET", f"{config.root}:bits:e", "old") == b"1"
        as_if_older(shared_redis, config.root, ["old-2"])
        await store.collect_garbage()
        assert shared_redis.do("HGET", f"{config.root}:bits:e", "old") == b"2"
        assert await found(store, SummaryFilter(environment="old")) == ["old-1", "old-2"]
        assert await found(store, SummaryFilter(environment="calc")) == ["new", "newer"]


async def test_making_a_large_index_says_how_far_it_is(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "ENTERED_AT_ONCE", 1)
    monkeypatch.setattr(index, "PROGRESS_SECONDS", 0.0)
    config = shared_redis.config()
    async with opened(config) as store:
        await store.collect_garbage()
        as_if_older(shared_redis, config.root, ["old-1", "old-2"])
        with capture_logs() as lines:
            await store.collect_garbage()
    told = [(line["event"], line["rollout"], line["of"]) for line in lines if "index" in line["event"]]
    assert told == [
        ("indexing the rollouts", 1, 2),
        ("indexing the rollouts", 2, 2),
        ("indexed the rollouts", 2, 2),
    ]
