"""Opens the store that the settings name: a SQLite file, or a Redis that services share.

Guarantee: the block ends with the store's error if the store fails for good, since nothing works without it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from rollout_service.cluster.identity import is_gone
from rollout_service.settings import Settings, StoreSettings
from rollout_service.store.contract import Store
from rollout_service.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from rollout_service.store.redis import RedisStore


@asynccontextmanager
async def open_store(
    settings: Settings, owner: str, clock: Callable[[], float] = time.time
) -> AsyncIterator[Store]:
    """Open the store for the block; `owner` is the identity of this service.

    `clock` returns Unix seconds, for a store of this service alone; services that share a Redis have its time.

    Raises:
        StoreError: It cannot be opened, must not be used, or fails for good within the block.
        ConfigurationError: The address of the Redis, its password file or the shared folder cannot be used.
    """
    async with await _open(settings, owner, clock) as store, anyio.create_task_group() as tasks:
        tasks.start_soon(store.failed)
        if not isinstance(store, SqliteStore) and store.segments is not None:
            tasks.start_soon(store.segments.keep_tidy)
            tasks.start_soon(store.segments.watch.run)
        yield store
        tasks.cancel_scope.cancel()


async def _open(settings: Settings, owner: str, clock: Callable[[], float]) -> SqliteStore | RedisStore:
    if settings.store.url is None:
        return await SqliteStore.open(settings.database, clock=clock, disk=settings.store.disk)
    return await _open_redis(settings.store, settings.store.url, owner)


async def _open_redis(settings: StoreSettings, url: str, owner: str) -> RedisStore:
    # Redis's client takes a tenth of the CPU time of a start, so a service without Redis does not import it.
    from rollout_service.store.redis import RedisConfig, RedisStore

    config = RedisConfig.of(settings, url)
    return await RedisStore.open(config, is_gone=is_gone, folder=settings.folder, owner=owner)
