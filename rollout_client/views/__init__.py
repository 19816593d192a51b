"""What people look at: the service at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from rollout_client._connection import Connection


class ViewCalls:
    """The calls of `RolloutClient` for pages and terminals."""

    _connection: Connection

    async def overview(self) -> wire.Overview:
        """Return the service at a glance, at most a second old; its numbers are those of the node that answers."""
        return await self._connection.call(wire.Overview, "GET", "/v1/overview")
