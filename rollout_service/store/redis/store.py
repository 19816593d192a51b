"""The store in Redis, which the services of many nodes share.

Guarantees: those of `connection`, `rollouts` and `runs`. An opened store holds two connections and two threads until it
closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from prometheus_client import Histogram

from rollout_service.base.errors import StoreError
from rollout_service.store.redis.cluster import RedisCluster
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.engines import RedisEngines
from rollout_service.store.redis.lists.index import enter_older
from rollout_service.store.redis.rollouts.changes import RedisRollouts
from rollout_service.store.redis.runs.store import RedisRuns
from rollout_service.store.redis.trajectories.ledger import RedisSegmentLedger
from rollout_service.store.redis.trajectories.place import InSharedFolder, TrajectoryPlace
from rollout_service.store.segments import SegmentFolder

LIBRARIES_SECONDS = 3_600.0
"""How often the service that collects looks for functions of other releases."""


class RedisStore(RedisRollouts):
    """The Redis store: `async with await RedisStore.open(config, is_gone=is_gone) as store:`."""

    segments: SegmentFolder | None = None
    """The shared folder with the trajectories; None if they are in Redis."""

    def __init__(
        self,
        connection: RedisConnection,
        *,
        is_gone: Callable[[str], bool],
        place: TrajectoryPlace | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(connection, is_gone=is_gone, place=place, clock=clock)
        self._cluster = RedisCluster(connection)
        self._engines = RedisEngines(connection)
        self._look_at_libraries = time.monotonic()
        self._runs = RedisRuns.of_store(connection, self)

    @classmethod
    async def open(
        cls,
        config: RedisConfig,
        *,
        is_gone: Callable[[str], bool],
        clock: Callable[[], float] | None = None,
        folder: Path | None = None,
        owner: str = "",
    ) -> Self:
        """Open the store in a Redis; `clock` returns Unix seconds, and Redis's own clock is used without it.

        `is_gone` tells whether the service of an owner has certainly ended, so that `recover` may requeue its work.
        Trajectories go to `folder`, which all services share, in files of `owner`; without a folder, to Redis.

        Raises:
            StoreError: The Redis does not answer, or must not be used.
            ConfigurationError: The address or the password file is wrong, or the folder is not writable, is not
                shared, or belongs to another store.
        """
        connection = await RedisConnection.open(config, clock=clock)
        try:
            segments = None if folder is None else await _open_segments(connection, folder, owner)
            place = None if segments is None else InSharedFolder(segments)
            store = cls(connection, is_gone=is_gone, place=place, clock=clock)
        except BaseException:
            await connection.close()
            raise
        if segments is not None:
            segments.watch.tell = store._tell_of_folder
        store.segments = segments
        return store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connection(self) -> RedisConnection:
        """The connection to the Redis, for the other parts of the store."""
        return self._connection

    @property
    def cluster(self) -> RedisCluster:
        return self._cluster

    @property
    def engines(self) -> RedisEngines:
        return self._engines

    @property
    def runs(self) -> RedisRuns:
        return self._runs

    @property
    def problem(self) -> StoreError | None:
        return self._connection.problem

    @property
    def errors(self) -> int:
        return self._connection.errors

    @property
    def rewinds(self) -> int:
        return self._connection.reconnects

    def size_bytes(self) -> int:
        return self._connection.size_bytes()

    @property
    def commit_seconds(self) -> Histogram:
        return self._connection.commit_seconds

    async def collect_garbage(self) -> None:
        """Delete the files of trajectories that are gone and, now and then, the functions that no node calls.

        Rollouts that the index lacks, as an earlier release wrote them, are entered first.

        Raises:
            StoreError: The Redis or the folder fails.
        """
        await enter_older(self._connection)
        await super().collect_garbage()
        if time.monotonic() >= self._look_at_libraries:
            self._look_at_libraries = time.monotonic() + LIBRARIES_SECONDS
            await self._cluster.delete_unused_libraries()

    def _tell_of_folder(self, problem: StoreError | None) -> None:
        """Let a folder that cannot be used count as a store that fails."""
        if problem is None:
            self._connection.health.succeeded("folder")
        else:
            self._connection.health.failed("folder", problem)

    async def failed(self) -> None:
        """Wait until the store fails for good, which only a defect can cause.

        Raises:
            StoreError: The store has failed.
        """
        await self._connection.failed()

    async def close(self) -> None:
        try:
            if self.segments is not None:
                await self.segments.close()
        finally:
            await self._connection.close()


async def _open_segments(connection: RedisConnection, folder: Path, owner: str) -> SegmentFolder:
    name = uuid4().hex[:12]
    return await SegmentFolder.open(folder, RedisSegmentLedger(connection), owner=owner or name, name=name)
