"""The nodes of a store that only one process can have open: that process.

Guarantees: it leads every role and is never declared dead. A drain lasts until it is undone or the process ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from pydantic import JsonValue

from api_schemas.events import Event
from api_schemas.nodes import NodeState
from rollout_service.base.signals import MonotonicCounter
from rollout_service.store.cluster_contract import (
    ClusterStore,
    Heartbeat,
    NameTakenError,
    NodeRecord,
    NodeReport,
    RoleLease,
    live_node,
    unknown_node,
)

Record = Callable[[str, str, dict[str, JsonValue]], Awaitable[Event]]
"""Appends an event: kind, subject, data."""


class SingleCluster(ClusterStore):
    """A cluster of at most one node, in memory."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._node: NodeRecord | None = None
        self._changes = MonotonicCounter(1)
        self._roles: dict[str, RoleLease] = {}
        self._tokens = count(1)

    @property
    def is_shared(self) -> bool:
        return False

    async def join(self, report: NodeReport, *, replacing: str | None = None) -> None:
        if self._node is not None and self._node.report.owner not in (report.owner, replacing):
            raise NameTakenError(self._node.report.name, self._node.report.owner)
        self._node = NodeRecord(report, NodeState.READY, 0.0)
        self._changes.increment()

    async def heartbeat(self, report: NodeReport) -> Heartbeat:
        if self._node is None or self._node.report.owner != report.owner:
            return Heartbeat(is_member=False)
        state = self._node.state
        self._node = NodeRecord(report, state, 0.0)
        if state is not NodeState.READY:
            return Heartbeat(is_member=True, state=state, states={state: 1})
        return Heartbeat(
            is_member=True,
            state=state,
            places=report.places,
            environments=dict.fromkeys(report.environments, 1),
            images=dict.fromkeys(report.images, 1),
            states={state: 1},
        )

    async def leave(self, owner: str) -> None:
        self._roles = {role: lease for role, lease in self._roles.items() if lease.owner != owner}
        if self._node is not None and self._node.report.owner == owner:
            self._node = None
            self._changes.increment()

    async def nodes(self) -> Sequence[NodeRecord]:
        return [] if self._node is None else [self._node]

    async def change_state(self, name: str, state: NodeState) -> None:
        node = self._named(name)
        if node.state is state:
            return
        self._node = NodeRecord(node.report, state, node.silent_seconds)
        await self._record(f"node.{state}", name, {})
        self._changes.increment()

    async def remove(self, name: str) -> None:
        self._named(name)
        raise live_node(name)

    def _named(self, name: str) -> NodeRecord:
        if self._node is None or self._node.report.name != name:
            raise unknown_node(name)
        return self._node

    async def wait_for_change(self, after: int) -> int:
        return await self._changes.wait_above(after)

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        held = self._roles.get(role)
        if held is None:
            held = self._roles[role] = RoleLease(role, owner, next(self._tokens))
        return held if held.owner == owner else None

    async def resign(self, role: str, owner: str) -> None:
        if (held := self._roles.get(role)) is not None and held.owner == owner:
            del self._roles[role]

    async def leader(self, role: str) -> RoleLease | None:
        return self._roles.get(role)
