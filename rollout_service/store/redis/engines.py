"""The engines of all services that share a Redis."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import from_json, to_json

from api_schemas.inference import BackendSpec
from rollout_service.base.signals import MonotonicCounter
from rollout_service.store.engines_contract import CommandKind, EnginesStore, PoolRecord, SharedBackend
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.reader import StreamEvent

# The backends and the commands to pools of all services that share a Redis.
#
# Guarantees beyond the contract: changes are noticed through the events, so nobody polls.

_KINDS = ("backend.changed", "pool.command", "pool.held", "pool.settled")


class RedisEngines(EnginesStore):
    """The engines of all services with the same prefix in one Redis."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._changes = MonotonicCounter(1)
        connection.events.listen(self._notice)

    def _notice(self, events: Sequence[StreamEvent]) -> None:
        if not events or any(event.kind in _KINDS for event in events):
            self._changes.increment()

    @property
    def is_shared(self) -> bool:
        return True

    async def wait_for_change(self, after: int) -> int:
        return await self._changes.wait_above(after)

    # ---- backends

    async def put(self, backend: SharedBackend) -> None:
        record = {
            "backend_id": backend.backend_id,
            "spec": backend.spec.model_dump(mode="json"),
            "loopback_of": backend.loopback_of,
            "exports": backend.exports,
            "is_draining": backend.is_draining,
            "lease_until": backend.lease_until,
        }
        await self._connection.call("engines_put", backend.backend_id, to_json(record))

    async def remove(self, backend_id: str) -> bool:
        return bool(await self._connection.call("engines_remove", backend_id))

    async def backends(self) -> Sequence[SharedBackend]:
        found: list[bytes | None] = await self._connection.read("engines_list")
        return [_backend(record) for record in found if record]

    # ---- commands

    async def ask(self, pool: str, kind: CommandKind, request: str) -> int | None:
        return await self._connection.call("engines_ask", pool, kind.value, request) or None

    async def pools(self) -> Sequence[PoolRecord]:
        return [_record(*each) for each in await self._connection.read("engines_pools")]

    async def hold(self, pool: str, number: int, owner: str) -> None:
        await self._connection.call("engines_hold", pool, number, owner)

    async def begin(self, pool: str, number: int) -> bool:
        return bool(await self._connection.call("engines_begin", pool, number))

    async def finish(self, pool: str, number: int, result: str, state: str) -> bool:
        return bool(await self._connection.call("engines_finish", pool, number, result, state))

    async def save_state(self, pool: str, revision: int, state: str) -> bool:
        return bool(await self._connection.call("engines_save_state", pool, revision, state))

    async def result(self, pool: str, number: int) -> str | None:
        key = self._connection.key(f"pool:{pool}:results")
        found: bytes | None = await self._connection.command("HGET", key, number)
        return found.decode() if found is not None else None


def _backend(record: bytes) -> SharedBackend:
    fields = from_json(record)
    return SharedBackend(
        backend_id=fields["backend_id"],
        spec=BackendSpec.model_validate(fields["spec"]),
        loopback_of=fields["loopback_of"],
        exports=tuple(fields["exports"]),
        is_draining=fields["is_draining"],
        lease_until=fields["lease_until"],
    )


def _record(pool: bytes, fields: Sequence[bytes | None], held: Sequence[bytes]) -> PoolRecord:
    number, kind, request, is_open, state, revision = ((field or b"").decode() for field in fields)
    return PoolRecord(
        pool=pool.decode(),
        number=int(number or 0),
        kind=CommandKind(kind or "resume"),
        request=request,
        is_open=is_open == "1",
        state=state,
        revision=int(revision or 0),
        held_by=frozenset(owner.decode() for owner in held),
    )


__all__ = ["RedisEngines"]
