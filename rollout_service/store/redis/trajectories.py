"""The places of the trajectories of a Redis store: Redis itself, or segment files of a shared folder or bucket.

The reference from `keep` finds the trajectory again, on every node, until its rollout is deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol
from uuid import uuid4

from rollout_service.base.errors import DefectError, RecordLostError, StoreError
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.segments import SegmentFolder, SegmentLedger

_MARK = b"@"
"""The first byte of a reference; no encoded trajectory begins with it."""


class TrajectoryPlace(Protocol):
    """
    Raises:
        StoreError: The place fails; every method can raise it.
        RecordLostError: A trajectory that is read is gone or damaged.
    """

    @property
    def problem(self) -> StoreError | None: ...

    def keep(self, data: bytes) -> AbstractAsyncContextManager[bytes]:
        """Make a trajectory durable; yield the record for Redis to store within the block."""

    async def abandon(self, stored: bytes) -> None:
        """Put the next trajectories elsewhere, since Redis refused to store this."""

    async def overwrite(self, stored: Sequence[bytes]) -> None:
        """Overwrite trajectories that are about to be erased; it is not an error if some are gone."""

    async def collect(self) -> int:
        """Delete what belongs to no rollout any more; return how many files."""

    async def read(self, stored: Mapping[str, bytes]) -> Sequence[bytes]:
        """Return the trajectories of Redis's records, which are by rollout, in their order."""


class InRedis(TrajectoryPlace):
    """Keeps trajectories in Redis itself, for short ones and for tests."""

    problem = None

    @asynccontextmanager
    async def keep(self, data: bytes) -> AsyncIterator[bytes]:
        yield data

    async def abandon(self, stored: bytes) -> None:
        raise DefectError(f"Redis refused a trajectory of {len(stored)} bytes", hint="Report it with the log.")

    async def overwrite(self, stored: Sequence[bytes]) -> None:
        """Do nothing: Redis itself deletes them."""

    async def collect(self) -> int:
        return 0  # nothing is left behind

    async def read(self, stored: Mapping[str, bytes]) -> Sequence[bytes]:
        return list(stored.values())


class InSharedFolder(TrajectoryPlace):
    """Keeps trajectories in segment files; Redis stores references to them."""

    def __init__(self, segments: SegmentFolder) -> None:
        self._segments = segments

    @property
    def problem(self) -> StoreError | None:
        return self._segments.watch.problem

    @asynccontextmanager
    async def keep(self, data: bytes) -> AsyncIterator[bytes]:
        async with self._segments.keep([data]) as references:
            yield _MARK + references[0].encode()

    async def abandon(self, stored: bytes) -> None:
        await self._segments.abandon(stored.removeprefix(_MARK).decode())

    async def overwrite(self, stored: Sequence[bytes]) -> None:
        await self._segments.overwrite([one for data in stored if (one := referred(data)) is not None])

    async def collect(self) -> int:
        return await self._segments.collect()

    async def read(self, stored: Mapping[str, bytes]) -> Sequence[bytes]:
        references = {
            f"the rollout {rollout_id}": one
            for rollout_id, data in stored.items()
            if (one := referred(data)) is not None
        }
        found = iter(await self._segments.read_all(references) if references else ())
        return [_whole(next(found)) if data.startswith(_MARK) else data for data in stored.values()]


def referred(stored: bytes | None) -> str | None:
    """Return the reference in Redis's record of a trajectory."""
    if stored is None or not stored.startswith(_MARK):
        return None
    return stored.removeprefix(_MARK).decode(errors="replace")


def _whole(record: bytes | RecordLostError) -> bytes:
    if isinstance(record, RecordLostError):
        raise record
    return record


class RedisSegmentLedger(SegmentLedger):
    """The ledger in Redis: each step is one function, so services that share the store see the same files."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    async def mark(self, proposal: str | None) -> tuple[str, str | None]:
        store, mark = await self._connection.call("segments_mark", uuid4().hex, proposal or "")
        return store.decode(), mark.decode() or None

    async def register(self, file: str, owner: str) -> None:
        await self._connection.call("segments_register", file, owner)

    async def seal(self, files: Collection[str]) -> None:
        await self._connection.call("segments_seal", *files)

    async def orphans(self) -> Sequence[str]:
        return [file.decode() for file in await self._connection.read("segments_orphans")]

    async def garbage(self, limit: int) -> Sequence[str]:
        key = self._connection.key("segments:garbage")
        return [file.decode() for file in await self._connection.command("SRANDMEMBER", key, limit)]

    async def forget(self, files: Collection[str]) -> None:
        await self._connection.call("segments_forget", *files)

    async def unknown(self, files: Collection[str]) -> Sequence[str]:
        return [file.decode() for file in await self._connection.read("segments_unknown", *files)]
