"""Opens the store that the settings name: a SQLite file, or a Redis that services share.

Guarantee: the block ends with the store's error if the store fails for good, since nothing works without it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from rollout_service.cluster.identity import is_gone
from rollout_service.settings import Settings, StoreSettings
from rollout_service.store.contract import Store
from rollout_service.store.redis import Durability, RedisConfig, RedisStore
from rollout_service.store.sqlite import SqliteStore


@asynccontextmanager
async def open_store(settings: Settings, owner: str) -> AsyncIterator[Store]:
    """Open the store for the block; `owner` is the identity of this service.

    Raises:
        StoreError: It cannot be opened, must not be used, or fails for good within the block.
        ConfigurationError: The address of the Redis, its password file or the shared folder cannot be used.
    """
    async with await _open(settings, owner) as store, anyio.create_task_group() as tasks:
        tasks.start_soon(store.failed)
        if isinstance(store, RedisStore) and store.segments is not None:
            tasks.start_soon(store.segments.keep_tidy)
        yield store
        tasks.cancel_scope.cancel()


def redis_config(settings: StoreSettings) -> RedisConfig | None:
    """Return where the store's Redis is; None if the store is a SQLite file."""
    if settings.url is None:
        return None
    return RedisConfig(
        url=settings.url,
        prefix=settings.prefix,
        password_file=settings.password_file,
        durability=Durability(settings.redis_durability),
        replicas=settings.redis_replicas,
    )


async def _open(settings: Settings, owner: str) -> SqliteStore | RedisStore:
    config = redis_config(settings.store)
    if config is None:
        return await SqliteStore.open(settings.database)
    return await RedisStore.open(config, is_gone=is_gone, folder=settings.store.folder, owner=owner)
