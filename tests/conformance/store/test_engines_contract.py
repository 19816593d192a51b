"""Every kind of store keeps the contract of backends; those that services share also keep that of commands."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from rollout_service.engines.serving.policies import backend_id_of_spec
from rollout_service.store.engines_contract import BackendStore, CommandKind, PoolRecord, SharedBackend
from rollout_service.store.file_backends import FileBackends
from rollout_service.store.redis import RedisConnection
from rollout_service.store.redis.store import RedisEngines
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


@pytest.fixture
async def shared(shared_redis: RedisServer) -> AsyncIterator[tuple[RedisEngines, RedisEngines]]:
    """Yield the same engines, as two services see them."""
    config = shared_redis.config()
    one, other = await RedisConnection.open(config), await RedisConnection.open(config)
    try:
        yield RedisEngines(one), RedisEngines(other)
    finally:
        await one.close()
        await other.close()


@pytest.fixture(params=["file", "redis"])
async def backends(
    request: pytest.FixtureRequest, tmp_path: Path, shared: tuple[RedisEngines, RedisEngines]
) -> BackendStore:
    return shared[0] if request.param == "redis" else FileBackends(tmp_path / "backends.json", backend_id_of_spec)


def backend(number: int, *, pool: str = "policy", **fields: object) -> SharedBackend:
    spec = BackendSpec(url=HttpUrl(f"http://engine-{number}:30000"), pool=pool)
    return SharedBackend(backend_id_of_spec(spec), spec, **fields)  # type: ignore[arg-type]


async def the_pool(engines: RedisEngines) -> PoolRecord:
    [record] = await engines.pools()
    return record


async def test_the_end_of_a_lease_is_kept(backends: BackendStore) -> None:
    await backends.put(backend(1, lease_until=1_800_000_000.5))
    assert [each.lease_until for each in await backends.backends()] == [1_800_000_000.5]


async def test_backends_are_listed_in_the_order_in_which_they_came(backends: BackendStore) -> None:
    assert await backends.backends() == []
    given = [backend(number) for number in (3, 1, 2)]
    for each in given:
        await backends.put(each)
    await backends.put(given[0])
    assert await backends.backends() == given
    assert await backends.remove(given[1].backend_id)
    assert not await backends.remove(given[1].backend_id)
    assert await backends.backends() == [given[0], given[2]]


async def test_a_change_of_backends_wakes_whoever_waits(backends: BackendStore) -> None:
    seen = await backends.wait_for_change(0)
    await backends.put(backend(1))
    with anyio.fail_after(5):
        seen = await backends.wait_for_change(seen)
    await backends.remove(backend(1).backend_id)
    with anyio.fail_after(5):
        await backends.wait_for_change(seen)


async def test_all_fields_of_a_backend_reach_the_other_services(
    shared: tuple[RedisEngines, RedisEngines],
) -> None:
    one, other = shared
    seen = await other.wait_for_change(0)
    given = backend(1, pool="judge", loopback_of="boot/1", exports=("top_logprobs",), is_draining=True)
    await one.put(given)
    with anyio.fail_after(5):
        await other.wait_for_change(seen)
    assert await other.backends() == [given]


async def test_a_pool_has_one_open_command_that_ends_once(shared: tuple[RedisEngines, RedisEngines]) -> None:
    one, other = shared
    assert await one.ask("policy", CommandKind.PAUSE, '{"a":1}') == 1
    assert await other.ask("policy", CommandKind.PAUSE, '{"a":1}') == 1  # the same command, asked again
    assert await other.ask("policy", CommandKind.RESUME, "{}") is None
    assert await other.ask("judge", CommandKind.RESUME, "{}") == 1
    assert await one.finish("judge", 1, "done", "state")
    records = {record.pool: record for record in await other.pools()}
    assert records["policy"].is_open
    assert (records["judge"].is_open, records["judge"].state) == (False, "state")
    assert await one.begin("policy", 1)
    assert not await other.begin("policy", 1)
    assert await other.result("policy", 1) is None
    assert not await other.finish("policy", 2, "late", "")
    assert await other.finish("policy", 1, "done", "new")
    assert not await one.finish("policy", 1, "again", "old")
    assert await one.result("policy", 1) == "done"
    assert await one.ask("policy", CommandKind.RESUME, "{}") == 2


async def test_services_that_hold_are_listed_while_the_command_is_open(
    shared: tuple[RedisEngines, RedisEngines],
) -> None:
    one, other = shared
    assert await one.ask("policy", CommandKind.PAUSE, "{}") == 1
    seen = await one.wait_for_change(0)
    await other.hold("policy", 1, "b")
    with anyio.fail_after(5):
        await one.wait_for_change(seen)
    assert (await the_pool(one)).held_by == {"b"}
    await one.finish("policy", 1, "", "")
    await other.hold("policy", 1, "late")
    assert (await the_pool(one)).held_by == frozenset()


async def test_a_state_is_replaced_only_by_whoever_knows_the_present_one(
    shared: tuple[RedisEngines, RedisEngines],
) -> None:
    one, other = shared
    assert await one.save_state("policy", 0, "first")
    assert not await other.save_state("policy", 0, "late")
    assert (await the_pool(other)).state == "first"
    assert await one.ask("policy", CommandKind.RESUME, "{}") == 1
    assert not await other.save_state("policy", 1, "while a command is open")
    assert await one.finish("policy", 1, "", "second")
    assert (await the_pool(other)).revision == 2
