"""Calls for the views that people look at: the overview of the service, and trajectories."""

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

    async def outline(self, rollout_id: str, *, node: int | None = None) -> wire.TrajectoryOutline:
        """Return a trajectory without its tokens; `node` is the number of a sub-agent, for its trajectory.

        Raises:
            NotFoundError: There is no such rollout or sub-agent, or it has no trajectory.
        """
        params = {} if node is None else {"node": str(node)}
        path = f"/v1/rollouts/{rollout_id}/outline"
        return await self._connection.call(wire.TrajectoryOutline, "GET", path, params=params)

    async def tokens(
        self,
        rollout_id: str,
        *,
        segment: int = 0,
        start: int = 0,
        count: int = 2_000,
        node: int | None = None,
    ) -> wire.TokenRange:
        """Return up to 20,000 tokens of a segment as columns, with their text.

        Raises:
            NotFoundError: There is no such rollout or sub-agent, or it has no trajectory.
            InvalidRequestError: There is no such segment, or `count` is too large.
        """
        given = {"segment": segment, "start": start, "count": count, "node": node}
        params = {name: str(value) for name, value in given.items() if value is not None}
        path = f"/v1/rollouts/{rollout_id}/tokens"
        return await self._connection.call(wire.TokenRange, "GET", path, params=params)

    async def saved_page(self, rollout_id: str) -> bytes:
        """Return the page of a rollout that has ended as one HTML file, which needs neither network nor service.

        Raises:
            NotFoundError: There is no such rollout, or it has not ended.
        """
        response = await self._connection.send(
            "GET", f"/v1/rollouts/{rollout_id}/page", headers={"accept": "text/html"}
        )
        return response.content
