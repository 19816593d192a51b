"""The nodes that share the store, as callers of the API see and command them.

Guarantees: a command reaches a node on any host through the store, within a heartbeat. This node's own figures are
those of this moment, other nodes' those of their last heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from api_schemas.nodes import NodeState, NodeView
from rollout_service.store.cluster_contract import ClusterStore, NodeRecord, NodeReport, unknown_node


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """All nodes, and the commands that they take."""

    cluster: ClusterStore
    own: Callable[[], NodeReport]
    """Returns what this node says of itself now."""

    async def list(self) -> list[NodeView]:
        """Return all nodes by name, dead ones included until they are removed."""
        own = self.own()
        views = [_view(record, own) for record in await self.cluster.nodes()]
        return views or [NodeView.model_validate_json(own.view)]

    async def get(self, name: str) -> NodeView:
        """Return a node.

        Raises:
            NotFoundError: No node has this name.
        """
        for view in await self.list():
            if view.node == name:
                return view
        raise unknown_node(name)

    async def drain(self, name: str) -> NodeView:
        """Tell a node to claim no more rollouts; those under way continue.

        Raises:
            NotFoundError: No node has this name.
            ConflictError: The node is dead.
        """
        await self.cluster.change_state(name, NodeState.DRAINING)
        return await self.get(name)

    async def resume(self, name: str) -> NodeView:
        """Tell a node to claim rollouts again.

        Raises:
            NotFoundError: No node has this name.
            ConflictError: The node is dead.
        """
        await self.cluster.change_state(name, NodeState.READY)
        return await self.get(name)

    async def remove(self, name: str) -> None:
        """Forget a dead node.

        Raises:
            NotFoundError: No node has this name.
            ConflictError: The node is alive.
        """
        await self.cluster.remove(name)


def _view(record: NodeRecord, own: NodeReport) -> NodeView:
    report = own if record.report.owner == own.owner else record.report
    view = NodeView.model_validate_json(report.view)
    return view.model_copy(
        update={"state": record.state, "silent_seconds": round(max(0.0, record.silent_seconds), 3)}
    )
