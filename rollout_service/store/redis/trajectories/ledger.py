"""The ledger of segment files in Redis.

Guarantee: each step is one function of Redis, so services that share the store see the same files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import uuid4

from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.segments import SegmentLedger, SegmentTotals


class RedisSegmentLedger(SegmentLedger):
    """The segment files of the store in a Redis; see `SegmentLedger`."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    async def store_id(self) -> str:
        store, _ = await self._connection.call("segments_mark", uuid4().hex, "")
        return str(store.decode())

    async def mark(self, proposal: str | None) -> str | None:
        _, mark = await self._connection.call("segments_mark", uuid4().hex, proposal or "")
        return mark.decode() or None

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

    async def totals(self) -> SegmentTotals:
        return SegmentTotals(*(await self._connection.read("segments_totals")))
