"""Runs in a Redis that several services share: their changes follow one another, and none gets lost."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import anyio
import pytest

from api_schemas.runs import FileTasks, InlineTasks, RunState
from api_schemas.tasks import Task
from rollout_service.base.errors import (
    ConflictError,
    DefectError,
    LeadershipLostError,
    StoreError,
)
from rollout_service.settings import RetentionSettings
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.redis import RedisConfig, RedisConnection
from rollout_service.store.redis.runs.database import RunDatabase
from rollout_service.store.redis.runs.records import RunKeys, pack
from rollout_service.store.redis.store import RedisStore
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest, NoBatch
from tests.support.redis_server import redis_server
from tests.support.runs import TASKS, make_ready, new_group, run_request
from tests.support.store.servers import redis_store

pytestmark = pytest.mark.redis


@pytest.fixture
async def two(config: RedisConfig) -> AsyncIterator[Sequence[RedisStore]]:
    async with redis_store(config) as one, redis_store(config) as other:
        yield one, other


async def create(store: RedisStore) -> None:
    await store.runs.create(run_request(source=InlineTasks(open=True)), tasks=0, digest=None, version=0)


async def test_two_services_that_create_a_run_at_once_make_one(two):
    made: list[bool] = []

    async def make(store: RedisStore) -> None:
        _, is_new = await store.runs.create(run_request(), tasks=4, digest=None, version=0)
        made.append(is_new)

    async with anyio.create_task_group() as tasks:
        for store in two * 8:
            tasks.start_soon(make, store)
    assert sorted(made) == [False] * 15 + [True]
    for store in two:
        assert [run.run_id for run in await store.runs.list()] == ["a"]
        assert await store.runs.inline_tasks("a", first=0, limit=10) == TASKS
        with pytest.raises(ConflictError):
            await store.runs.create(run_request(group_size=7), tasks=4, digest=None, version=0)


async def test_changes_of_two_services_follow_one_another(two):
    await create(two[0])

    async def append(store: RedisStore, number: int) -> None:
        task = Task(environment="calc", instance={"n": number})
        await store.runs.append("a", [task], offset=None, close=False)
        await store.runs.update("a", version=number)

    async with anyio.create_task_group() as tasks:
        for number in range(60):
            tasks.start_soon(append, two[number % 2], number)
    run = await two[0].runs.get("a")
    assert run == await two[1].runs.get("a")
    assert (run.tasks, run.version) == (60, 59)
    stored = await two[1].runs.inline_tasks("a", first=0, limit=100)
    assert sorted(task.instance["n"] for task in stored) == list(range(60))


async def test_runs_are_listed_in_the_order_of_their_creation(two):
    names = [f"r{number}" for number in (3, 1, 2)]
    for name in names:
        await two[0].runs.create(run_request(run_id=name), tasks=4, digest=None, version=0)
    assert [run.run_id for run in await two[1].runs.list()] == names
    await two[1].runs.update("r1", state=RunState.ENDED)
    assert [run.run_id for run in await two[0].runs.active()] == ["r3", "r2"]
    assert [run.run_id for run in await two[0].runs.list()] == names


async def test_many_tasks_are_appended_in_one_call(two):
    await create(two[0])
    many = [Task(environment="calc", instance={"n": number}) for number in range(9_500)]
    await two[0].runs.append("a", many, offset=0, close=False)
    assert (await two[1].runs.append("a", many, offset=0, close=False)).tasks == 9_500
    assert await two[1].runs.inline_tasks("a", first=9_490, limit=100) == many[9_490:]


async def test_a_change_wakes_those_who_wait_in_another_service(two):
    one, other = two
    await create(one)
    changed, delivered = await other.runs.wait_for_change(0), other.runs.deliveries("a")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.runs.wait_for_change, changed)
            tasks.start_soon(other.runs.wait_for_delivery, "a", delivered)
            await one.runs.update("a", version=1)


async def test_a_service_that_no_longer_leads_changes_nothing(shared_redis):
    config = shared_redis.config()
    leader = f"{config.root}:leader:runs"
    async with redis_store(config) as store:
        await create(store)
        shared_redis.do("HSET", leader, "owner", "x", "token", 7)
        first = store.runs.fenced(RoleLease("runs", "x", 7))
        assert (await first.update("a", version=1)).version == 1
        shared_redis.do("HSET", leader, "owner", "y", "token", 8)
        with pytest.raises(LeadershipLostError) as caught:
            await first.update("a", version=2)
        assert caught.value.hint
        assert (await first.get("a")).version == 1
        second = store.runs.fenced(RoleLease("runs", "y", 8))
        assert (await second.update("a", version=2)).version == 2
        shared_redis.do("HSET", leader, "owner", "")
        with pytest.raises(LeadershipLostError):
            await second.update("a", version=3)


async def test_a_run_can_be_drained_but_not_go_on_while_redis_is_full():
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server())
        store = await stack.enter_async_context(redis_store(server.config()))
        await make_groups_ready(store, 2)
        await store.runs.lease(BatchLeaseRequest("a", "one", 60))
        server.do("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(StoreError) as caught:
            await store.runs.update("a", version=1)
        assert "maxmemory" in caught.value.hint
        assert (await store.runs.get("a")).version == 0
        await store.runs.acknowledge("a", 0)
        second = await store.runs.lease(BatchLeaseRequest("a", "one", 60))
        assert isinstance(second, BatchLease)
        await store.runs.give_back("a", second.number)
        await store.runs.lease(BatchLeaseRequest("a", "one", 60))
        await store.runs.renew_batch("a", second.number, key="one", seconds=90)
        await store.runs.acknowledge("a", second.number)
        assert await store.runs.prune("a", seconds=None, max_bytes=0) == 2
        assert await store.runs.delete_expired(RetentionSettings(settled_group_seconds=0)) == 2
        assert await store.counts() == {}
        server.do("CONFIG", "SET", "maxmemory", "0")
        assert (await store.runs.update("a", version=1)).version == 1


async def test_every_word_reaches_redis_as_it_is(config):
    connection = await RedisConnection.open(config)
    try:
        database = RunDatabase(connection)
        words = [b"", bytes(range(256)), "é\0☃", 12, 1_700_000_000.123457, b"x" * 70_000]
        _, replies = await database.read([("ECHO", word) for word in words])
        expected = [b"", bytes(range(256)), "é\0☃".encode(), b"12", b"1700000000.123457", b"x" * 70_000]
        assert replies == expected
        _, nothing = await database.read([])
        assert nothing == []
        with pytest.raises(DefectError, match="Write commands are not allowed"):
            await connection.read("runs_read", pack([("SET", RunKeys(config.root, "a").run, 1)]))
    finally:
        await connection.close()


async def make_groups_ready(store: RedisStore, count: int) -> None:
    source = FileTasks(path="/x.jsonl", environment="calc", epochs=1)
    await store.runs.create(run_request(source=source, batch_size=1), tasks=count, digest=None, version=0)
    await make_ready(store, *range(count))


async def test_each_batch_goes_to_one_of_many_consumers(two):
    await make_groups_ready(two[0], 24)
    leased: list[int] = []

    async def consume(store: RedisStore, key: str) -> None:
        while isinstance(batch := await store.runs.lease(BatchLeaseRequest("a", key, 60)), BatchLease):
            leased.append(batch.number)
            await store.runs.acknowledge("a", batch.number)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(consume, two[number % 2], f"consumer {number}")
    assert sorted(leased) == list(range(24))
    run = await two[1].runs.get("a")
    assert (run.state, run.count("batches:acknowledged"), run.count("acknowledged")) == (
        RunState.FINISHED,
        24,
        24,
    )
    last = {event.subject for event in await two[0].events(after=0) if event.kind == "batch.acknowledged"}
    assert len(last) == 24


async def test_a_lease_runs_by_the_clock_of_redis(two):
    await make_groups_ready(two[0], 1)
    first = await two[0].runs.lease(BatchLeaseRequest("a", "one", 0.3))
    assert isinstance(first, BatchLease)
    waiting = await two[1].runs.lease(BatchLeaseRequest("a", "other", 60))
    assert isinstance(waiting, NoBatch)
    assert 0 < waiting.due_in <= 0.3
    with anyio.fail_after(10):
        while isinstance(again := await two[1].runs.lease(BatchLeaseRequest("a", "other", 60)), NoBatch):
            await anyio.sleep(0.05)
    assert (again.number, again.delivery) == (first.number, 2)
    with pytest.raises(ConflictError):
        await two[0].runs.renew_batch("a", 0, key="one", seconds=60)


async def test_groups_that_two_services_start_at_once_start_once(two):
    source = FileTasks(path="/x.jsonl", environment="calc", epochs=1)
    await two[0].runs.create(run_request(source=source), tasks=50, digest=None, version=0)
    started: list[int] = []

    async def start(store: RedisStore) -> None:
        while (cursor := (await store.runs.get("a")).cursor) < 20:
            started.append(await store.runs.start_groups("a", [new_group(cursor)]))

    async with anyio.create_task_group() as tasks:
        for store in two:
            tasks.start_soon(start, store)
    assert sum(started) == (await two[0].runs.get("a")).count("open") == 20
    assert sum((await two[1].counts()).values()) == 40
