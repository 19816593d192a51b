"""The nodes that share a Redis: who is a member, and who leads.

Guarantees beyond the contract: all times are Redis's own. A leader that let its lease expire keeps its token if nobody
else led meanwhile, since nothing can have happened that it would write over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pydantic_core import from_json, to_json

from api_schemas.nodes import NodeState
from rollout_service.base.signals import MonotonicCounter
from rollout_service.store.cluster_contract import (
    DEAD_SECONDS,
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
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.reader import StreamEvent

_FIELDS = tuple(field.name for field in fields(NodeReport))


class RedisCluster(ClusterStore):
    """The cluster of all services with the same prefix in one Redis."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._changes = MonotonicCounter(1)
        connection.events.listen(self._notice)

    def _notice(self, events: Sequence[StreamEvent]) -> None:
        if not events or any(event.kind.startswith("node.") for event in events):
            self._changes.increment()

    @property
    def is_shared(self) -> bool:
        return True

    async def join(self, report: NodeReport, *, replacing: str | None = None) -> None:
        holder: bytes = await self._connection.call(
            "cluster_join", report.name, report.owner, replacing or "", DEAD_SECONDS, *_encoded(report)
        )
        if holder:
            raise NameTakenError(report.name, holder.decode())

    async def heartbeat(self, report: NodeReport) -> Heartbeat:
        state, sums, dead = await self._connection.call(
            "cluster_heartbeat", report.owner, DEAD_SECONDS, *_encoded(report)
        )
        if not state:
            return Heartbeat(is_member=False)
        counts = _counts(sums)
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
            NodeRecord(_decoded(report), NodeState(state.decode()), float(silent))
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
        return await self._changes.wait_above(after)

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        leader, token = await self._connection.call("cluster_lead", role, owner, LEADER_SECONDS)
        return RoleLease(role, owner, token) if leader.decode() == owner else None

    async def resign(self, role: str, owner: str) -> None:
        await self._connection.call("cluster_resign", role, owner)

    async def leader(self, role: str) -> RoleLease | None:
        leader, token = await self._connection.read("cluster_leader", role)
        return RoleLease(role, leader.decode(), token) if leader else None

    async def delete_unused_libraries(self) -> int:
        """Delete the functions of other releases that no member calls any more; return how many libraries that was.

        A service that still calls one of them, under another prefix for example, loads it again.

        Raises:
            StoreError: The Redis fails.
        """
        used = {name.decode() for name in await self._connection.read("cluster_libraries")}
        unused = await self._connection.libraries() - used
        for name in unused:
            await self._connection.delete_library(name)
        return len(unused)


def _encoded(report: NodeReport) -> tuple[bytes, int, bytes, bytes]:
    whole = to_json({name: getattr(report, name) for name in _FIELDS})
    environments, images = (to_json(sorted(names)) for names in (report.environments, report.images))
    return whole, report.places, environments, images


def _decoded(report: bytes) -> NodeReport:
    given: dict[str, Any] = from_json(report)
    return NodeReport(**{name: given[name] for name in _FIELDS if name in given})


def _counts(pairs: Any) -> dict[str, int]:
    """Return the answer to HGETALL, which is a flat list inside a function's answer."""
    flat = [part for pair in pairs.items() for part in pair] if isinstance(pairs, dict) else list(pairs)
    return {name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}


def _under(prefix: str, counts: dict[str, int]) -> dict[str, int]:
    return {name[len(prefix) :]: count for name, count in counts.items() if name.startswith(prefix) and count}
