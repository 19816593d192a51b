"""Lists of rollouts that stay fast however many there are, and views for people."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypedDict

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rollout_client._connection import Connection


class SummaryFilters(TypedDict, total=False):
    """Which rollouts to list: those that all these filters select; `api_schemas.views.SummaryFilter` says more."""

    states: Sequence[wire.RolloutState]
    run: str | None
    group: int | None
    environment: str | None
    error: str | None
    reward_min: float | None
    reward_max: float | None
    since: datetime | None
    until: datetime | None
    text: str | None


class ListCalls:
    """The calls of `RolloutClient` for lists; they raise `InvalidRequestError` if a filter cannot be used as it is."""

    _connection: Connection

    async def summary_page(
        self,
        *,
        order: Literal["newest", "oldest"] = "newest",
        cursor: str | None = None,
        limit: int = 100,
        **filters: Unpack[SummaryFilters],
    ) -> wire.SummaryPage:
        """Return a page of rollouts as short rows, those that all these filters select.

        `text` is the beginning of the id, and `error` the code of the error that ended the rollout, or its last
        attempt. A page can be short, or empty, although there are more: go on while `next_cursor` is not None.
        """
        states = filters.pop("states", ())
        given = {**filters, "state": states, "order": order, "cursor": cursor, "limit": limit}
        params = {name: _param(value) for name, value in given.items() if value is not None}
        return await self._connection.call(wire.SummaryPage, "GET", "/v1/summaries", params=params)

    async def summaries(
        self, *, order: Literal["newest", "oldest"] = "newest", **filters: Unpack[SummaryFilters]
    ) -> AsyncGenerator[wire.RolloutSummary]:
        """Yield all rollouts that all these filters select, as short rows; `summary_page` explains them."""
        cursor: str | None = None
        while True:
            page = await self.summary_page(order=order, cursor=cursor, limit=1_000, **filters)
            for row in page.rows:
                yield row
            if (cursor := page.next_cursor) is None:
                return


def _param(value: object) -> str | list[str]:
    if isinstance(value, datetime):
        return value.isoformat()
    return [str(each) for each in value] if isinstance(value, list | tuple) else str(value)


class ViewCalls:
    """The calls of `RolloutClient` for pages and terminals.

    They raise `NotFoundError` if there is no such rollout or sub-agent, or if it has no trajectory or has not ended.
    """

    _connection: Connection

    async def overview(self) -> wire.Overview:
        """Return the service at a glance, at most a second old; its numbers are those of the node that answers."""
        return await self._connection.call(wire.Overview, "GET", "/v1/overview")

    async def outline(self, rollout_id: str, *, node: int | None = None) -> wire.TrajectoryOutline:
        """Return a trajectory without its tokens; `node` is the number of a sub-agent, for its trajectory."""
        path = f"/v1/rollouts/{rollout_id}/outline"
        return await self._connection.call(wire.TrajectoryOutline, "GET", path, params={"node": node})

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
            InvalidRequestError: There is no such segment, or `count` is too large.
        """
        params = {"segment": segment, "start": start, "count": count, "node": node}
        path = f"/v1/rollouts/{rollout_id}/tokens"
        return await self._connection.call(wire.TokenRange, "GET", path, params=params)

    async def saved_page(self, rollout_id: str) -> bytes:
        """Return the page of a rollout that has ended as one HTML file, which needs neither network nor service."""
        response = await self._connection.send(
            "GET", f"/v1/rollouts/{rollout_id}/page", headers={"accept": "text/html"}
        )
        return response.content
