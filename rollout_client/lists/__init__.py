"""Lists of rollouts that stay fast however many there are: short rows, filtered by the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from rollout_client._connection import Connection


class ListCalls:
    """The calls of `RolloutClient` for lists."""

    _connection: Connection

    async def summary_page(
        self,
        *,
        states: Sequence[wire.RolloutState] = (),
        run: str | None = None,
        group: int | None = None,
        environment: str | None = None,
        error: str | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        text: str | None = None,
        order: Literal["newest", "oldest"] = "newest",
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.SummaryPage:
        """Return a page of rollouts as short rows, those that all these filters select.

        `text` is what the id begins with, and `error` the code of the error that ended the rollout, or its last
        attempt. A page can be short, or empty, although there are more: go on while `next_cursor` is not None.

        Raises:
            InvalidRequestError: A filter cannot be used as it is.
        """
        given = {
            "run": run,
            "group": group,
            "environment": environment,
            "error": error,
            "reward_min": reward_min,
            "reward_max": reward_max,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "text": text,
            "order": order,
            "cursor": cursor,
            "limit": limit,
        }
        params: dict[str, str | list[str]] = {
            name: str(value) for name, value in given.items() if value is not None
        }
        params["state"] = [str(state) for state in states]
        return await self._connection.call(wire.SummaryPage, "GET", "/v1/summaries", params=params)

    async def summaries(
        self,
        *,
        states: Sequence[wire.RolloutState] = (),
        run: str | None = None,
        group: int | None = None,
        environment: str | None = None,
        error: str | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        text: str | None = None,
        order: Literal["newest", "oldest"] = "newest",
    ) -> AsyncGenerator[wire.RolloutSummary]:
        """Yield all rollouts that all these filters select, as short rows; `summary_page` says what they mean.

        Raises:
            InvalidRequestError: A filter cannot be used as it is.
        """
        cursor: str | None = None
        while True:
            page = await self.summary_page(
                states=states,
                run=run,
                group=group,
                environment=environment,
                error=error,
                reward_min=reward_min,
                reward_max=reward_max,
                since=since,
                until=until,
                text=text,
                order=order,
                cursor=cursor,
                limit=1_000,
            )
            for row in page.rows:
                yield row
            if (cursor := page.next_cursor) is None:
                return
