"""Calls for the service itself: its environments, its nodes, and whether it can take work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from rollout_client._connection import Connection


class ServiceCalls:
    """The calls of `RolloutClient` for the service itself.

    They raise `NotFoundError` if there is no such node or environment, and `ConflictError` if a node is dead or, to be
    removed, is not.
    """

    _connection: Connection

    async def environments(self) -> list[wire.EnvironmentView]:
        """Return the environments that tasks can name."""
        return await self._connection.call(list[wire.EnvironmentView], "GET", "/v1/environments")

    async def dataset(
        self, environment: str, *, limit: int = 1_000, offset: int = 0, split: str | None = None
    ) -> list[dict[str, wire.JsonValue]]:
        """Return instances that ship with an environment, of one split or of all.

        There are at most `limit`, which is at most 10,000, from `offset` on.

        Raises:
            InvalidRequestError: There is no such split.
        """
        params = {"limit": limit, "offset": offset, "split": split}
        path = f"/v1/environments/{environment}/dataset"
        return await self._connection.call(list[dict[str, wire.JsonValue]], "GET", path, params=params)

    async def sandboxes(self) -> list[wire.SandboxView]:
        """Return the sandboxes that are alive."""
        return await self._connection.call(list[wire.SandboxView], "GET", "/v1/sandboxes")

    async def nodes(self) -> list[wire.NodeView]:
        """Return the nodes that share the store, with their work and the reasons that hold back new sandboxes."""
        return await self._connection.call(list[wire.NodeView], "GET", "/v1/nodes")

    async def hangs(self, *, node: str | None = None) -> wire.HangReport:
        """Return the steps that are stuck, slow or held back at a node; by default, at the one that answers."""
        return await self._connection.call(wire.HangReport, "GET", "/v1/hangs", params={"node": node})

    async def drain_node(self, node: str) -> wire.NodeView:
        """Let a node end its rollouts and begin no more."""
        return await self._connection.call(wire.NodeView, "POST", f"/v1/nodes/{node}/drain")

    async def resume_node(self, node: str) -> wire.NodeView:
        """Let a drained node begin rollouts again."""
        return await self._connection.call(wire.NodeView, "POST", f"/v1/nodes/{node}/resume")

    async def remove_node(self, node: str) -> None:
        """Remove a dead node from the list of nodes."""
        await self._connection.call(None, "DELETE", f"/v1/nodes/{node}")

    async def node(self) -> wire.NodeConcurrency:
        """Return how much the service runs at once."""
        return await self._connection.call(wire.NodeConcurrency, "GET", "/v1/node")

    async def update_node(self, patch: wire.NodePatch) -> wire.NodeConcurrency:
        """Change how much the service runs at once, until it restarts. Work under way is not interrupted."""
        body = patch.model_dump(mode="json", exclude_none=True)
        return await self._connection.call(wire.NodeConcurrency, "PATCH", "/v1/node", body)

    async def ready(self) -> None:
        """Wait until the service can take work, for as long as this client's patience lasts."""
        await self._connection.call(None, "GET", "/ready")

    async def readiness(self) -> wire.Readiness:
        """Return whether the service can take work now, and if not, why. This asks once.

        A refusal by a proxy, or by a service that is shutting down, counts as a reason too.

        Raises:
            UnreachableError: Nothing answers.
            ClientError: The answer says nothing about readiness.
        """
        return await self._connection.readiness()
