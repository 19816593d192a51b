"""The store in Redis, which the services of many nodes share: `rollouts`, `runs`, its nodes and their engines.

An opened store holds two connections and two threads until it closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self
from uuid import uuid4

import anyio
from prometheus_client import Histogram
from pydantic import TypeAdapter
from pydantic_core import to_json

from api_schemas.nodes import NodeState
from rollout_service.base.errors import StoreError
from rollout_service.base.signals import ChangeSignal, MonotonicCounter
from rollout_service.store.cluster_contract import (
    DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    LEADER_SECONDS,
    ClusterStore,
    Heartbeat,
    NameTakenError,
    NodeRecord,
    NodeReport,
    RoleLease,
    dead_node,
    live_node,
    unknown_node,
)
from rollout_service.store.engines_contract import CommandKind, EnginesStore, PoolRecord, SharedBackend
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.rollouts import RedisRollouts
from rollout_service.store.redis.runs.database import RunDatabase
from rollout_service.store.redis.runs.store import RedisRuns
from rollout_service.store.redis.trajectories import InSharedFolder, RedisSegmentLedger, TrajectoryPlace
from rollout_service.store.segments import SegmentFiles, SegmentFolder

_BACKEND = TypeAdapter(SharedBackend)


class RedisEngines(EnginesStore):
    is_shared = True

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._changes = MonotonicCounter(1)
        connection.topics.listen("cluster", self._notice)

    def _notice(self, message: bytes | None) -> None:
        if message is None or message.startswith((b"backend.", b"pool.")):
            self._changes.increment()

    async def wait_for_change(self, after: int) -> int:
        await self._connection.topics.confirmed("cluster")
        return await self._changes.wait_above(after)

    async def put(self, backend: SharedBackend) -> None:
        await self._connection.call("engines_put", backend.backend_id, _BACKEND.dump_json(backend))

    async def remove(self, backend_id: str) -> bool:
        return bool(await self._connection.call("engines_remove", backend_id))

    async def backends(self) -> Sequence[SharedBackend]:
        found: list[bytes | None] = await self._connection.read("engines_list")
        return [_BACKEND.validate_json(record) for record in found if record]

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


LIBRARIES_SECONDS = 3_600.0


_REPORT = TypeAdapter(NodeReport)


class RedisCluster(ClusterStore):
    """The cluster of all services with the same prefix in one Redis, by whose clock all times are.

    A leader that let its lease expire keeps its token if nobody else led meanwhile, since nothing can have happened
    that it would write over.
    """

    is_shared = True

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._changes = MonotonicCounter(1)
        self._free_at: dict[str, float] = {}
        """Ends of known leases on the clock of the event loop, unless they are renewed."""
        self._resigned = ChangeSignal()
        connection.topics.listen("cluster", self._notice)

    def _notice(self, message: bytes | None) -> None:
        if message is None or message.startswith(b"node."):
            self._changes.increment()
        if message is None:
            self._free_at.clear()
            self._resigned.notify()
        elif message.startswith(b"role "):
            self._free_at.pop(message.removeprefix(b"role ").decode(), None)
            self._resigned.notify()

    async def join(self, report: NodeReport, *, replacing: str | None = None) -> None:
        holder: bytes = await self._connection.call(
            "cluster_join", report.name, report.owner, replacing or "", DEAD_SECONDS, *_encoded(report)
        )
        if holder:
            raise NameTakenError(report.name, holder.decode())

    async def heartbeat(self, report: NodeReport) -> Heartbeat:
        asked = anyio.current_time()
        state, sums, dead, leases = await self._connection.call(
            "cluster_heartbeat", report.owner, DEAD_SECONDS, *_encoded(report)
        )
        if not state:
            return Heartbeat(is_member=False)
        counts = _counts(sums)
        left = _counts(leases)
        self._free_at |= {role: asked + milliseconds / 1000 for role, milliseconds in left.items()}
        if not all(left.values()):  # a role was resigned, perhaps while this service asked for it
            self._resigned.notify()
        return Heartbeat(
            is_member=True,
            state=NodeState(state.decode()),
            places=counts.get("places", 0),
            environments=_under("e:", counts),
            images=_under("i:", counts),
            states=_under("s:", counts),
            dead=[name.decode() for name in dead],
        )

    async def leave(self, owner: str) -> None:
        await self._connection.call("cluster_leave", owner)

    async def nodes(self) -> Sequence[NodeRecord]:
        found = await self._connection.read("cluster_nodes")
        return [
            NodeRecord(_REPORT.validate_json(report), NodeState(state.decode()), float(silent))
            for report, state, silent in found
        ]

    async def change_state(self, name: str, state: NodeState) -> None:
        had: bytes = await self._connection.call("cluster_state", name, state.value)
        if not had:
            raise unknown_node(name)
        if had.decode() == NodeState.DEAD:
            raise dead_node(name)

    async def remove(self, name: str) -> None:
        had: bytes = await self._connection.call("cluster_remove", name)
        if not had:
            raise unknown_node(name)
        if had.decode() != NodeState.DEAD:
            raise live_node(name)

    async def wait_for_change(self, after: int) -> int:
        await self._connection.topics.confirmed("cluster")
        return await self._changes.wait_above(after)

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        leader, token, left = await self._connection.call("cluster_lead", role, owner, LEADER_SECONDS)
        # A service that was declared dead leads nothing until it has joined again.
        self._free_at[role] = anyio.current_time() + (left / 1000 if leader else HEARTBEAT_SECONDS)
        return RoleLease(role, owner, token) if leader.decode() == owner else None

    async def wait_for_role(self, role: str) -> None:
        while (left := self._free_at.get(role, 0.0) - anyio.current_time()) > 0:
            with anyio.move_on_after(left):
                await self._resigned.wait()

    async def resign(self, role: str, owner: str) -> None:
        await self._connection.call("cluster_resign", role, owner)

    async def leader(self, role: str) -> RoleLease | None:
        leader, token = await self._connection.read("cluster_leader", role)
        return RoleLease(role, leader.decode(), token) if leader else None

    async def delete_unused_libraries(self) -> int:
        """Delete the functions of other releases that no member calls any more; return how many libraries that was.

        A service that still calls one, under another prefix for example, loads it again.
        """
        used = {name.decode() for name in await self._connection.read("cluster_libraries")}
        unused = await self._connection.libraries() - used
        for name in unused:
            await self._connection.delete_library(name)
        return len(unused)


def _encoded(report: NodeReport) -> tuple[bytes, int, bytes, bytes]:
    environments, images = (to_json(sorted(names)) for names in (report.environments, report.images))
    return _REPORT.dump_json(report), report.places, environments, images


def _counts(pairs: Any) -> dict[str, int]:
    """Read an answer to HGETALL, which is a flat list inside a function's answer."""
    flat = [part for pair in pairs.items() for part in pair] if isinstance(pairs, dict) else list(pairs)
    return {name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}


def _under(prefix: str, counts: dict[str, int]) -> dict[str, int]:
    return {name[len(prefix) :]: count for name, count in counts.items() if name.startswith(prefix) and count}


class RedisStore(RedisRollouts):
    """The Redis store: `async with await RedisStore.open(config, is_gone=is_gone) as store:`."""

    segments: SegmentFolder | None = None

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
        self._runs = RedisRuns(RunDatabase(connection), self, connection.topics)

    @classmethod
    async def open(
        cls,
        config: RedisConfig,
        *,
        is_gone: Callable[[str], bool],
        clock: Callable[[], float] | None = None,
        files: SegmentFiles | None = None,
        owner: str = "",
        commit_seconds: Histogram | None = None,
        may_be_away: bool = False,
    ) -> Self:
        """Open the store in a Redis; `clock` returns Unix seconds, and Redis's own clock is used without it.

        `is_gone` tells whether the service of an owner has certainly ended, so that `recover` may requeue its work.
        Trajectories go to a place that all services share, in files of `owner`; without `files`, to Redis. Shards share
        one `commit_seconds`. A Redis that may be away is used as soon as it answers.

        Raises:
            StoreError: The Redis does not answer, or must not be used.
            ConfigurationError: The address or the password file is wrong, or the place is not writable, is not shared,
                or belongs to another store.
        """
        connection = await RedisConnection.open(
            config, clock=clock, commit_seconds=commit_seconds, may_be_away=may_be_away
        )
        try:
            segments = None if files is None else await _open_segments(connection, files, owner, may_be_away)
            place = None if segments is None else InSharedFolder(segments)
            store = cls(connection, is_gone=is_gone, place=place, clock=clock)
        except BaseException:
            await connection.close()
            raise
        if segments is not None:
            segments.watch.tell = store._tell_of_folder
        store.segments = segments
        return store

    @property
    def connection(self) -> RedisConnection:
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
    def rewinds(self) -> int:
        return self._connection.reconnects

    async def collect_garbage(self) -> None:
        """Delete the files of trajectories that are gone and, now and then, the functions that no node calls."""
        await super().collect_garbage()
        if time.monotonic() >= self._look_at_libraries:
            self._look_at_libraries = time.monotonic() + LIBRARIES_SECONDS
            await self._cluster.delete_unused_libraries()

    def _tell_of_folder(self, problem: StoreError | None) -> None:
        if problem is None:
            self._connection.health.succeeded("folder")
        else:
            self._connection.health.failed("folder", problem)

    async def close(self) -> None:
        try:
            if self.segments is not None:
                await self.segments.close()
        finally:
            await super().close()


async def _open_segments(
    connection: RedisConnection, files: SegmentFiles, owner: str, may_be_away: bool
) -> SegmentFolder:
    name, ledger = uuid4().hex[:12], RedisSegmentLedger(connection)
    return await SegmentFolder.open(files, ledger, owner=owner or name, name=name, may_be_away=may_be_away)
