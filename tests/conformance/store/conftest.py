"""The stores that keep a contract, each on a clock that its test moves."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from rollout_service.cluster.identity import is_gone
from rollout_service.store import Store
from rollout_service.store.redis import RedisStore
from rollout_service.store.sqlite import SqliteStore
from tests.support.clocks import ManualClock
from tests.support.store.servers import files_of
from tests.support.store.sharded import opened_shards, shard_configs

Factory = Callable[[ManualClock], AbstractAsyncContextManager[Store]]
KINDS = ["sqlite", *(pytest.param(name, marks=pytest.mark.redis) for name in ("redis", "shards"))]
"""The stores of a module that does not name its own, such as those of each place of trajectories."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", getattr(metafunc.module, "KINDS", KINDS), indirect=True)


def is_dead(owner: str) -> bool:
    """Return whether an owner is gone: of those that the tests name, each is."""
    return "/" not in owner or is_gone(owner)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Factory:
    """Return a factory of stores that begin empty."""
    name = request.param
    shards = request.getfixturevalue("shared_shards") if name == "shards" else []
    server = request.getfixturevalue("shared_redis") if name.startswith("redis") else None

    @asynccontextmanager
    async def opened(clock: ManualClock) -> AsyncIterator[Store]:
        if name == "sqlite":
            store = await SqliteStore.open(":memory:", clock=clock)
        elif name == "shards":
            store = opened_shards(shard_configs(*shards), clock=clock, is_gone=is_dead)
        else:
            files = files_of(name, request)
            store = await RedisStore.open(server.config(), clock=clock, files=files, is_gone=is_dead)
        async with store as made:
            yield made

    return opened


@pytest.fixture
async def store(kind: Factory, clock: ManualClock) -> AsyncIterator[Store]:
    async with kind(clock) as made:
        yield made
