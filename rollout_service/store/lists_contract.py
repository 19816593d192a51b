"""The contract of the lists that people look at: rollouts as short rows, a run's groups, and how a run went over time.

- A page is found without looking at more than `LOOKED_AT` records, however many there are. If so few match that this
  does not fill the page, it is short or empty, and its cursor goes on from there; the last page has none.
- Following the cursors gives every record that matches all the time exactly once, while new ones arrive.
- What a run's history says of a group is kept as long as the run, also when the group's rollouts are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from api_schemas.runs.history import GroupPage, RunHistory
from api_schemas.views.summaries import SummaryFilter, SummaryOrder, SummaryPage

LOOKED_AT = 50_000
CLOCK_STEP_SECONDS = 300.0
"""By how much the clock may ever have been set back without hiding a rollout from a search by time."""


class SummaryStore(Protocol):
    async def summaries(
        self,
        which: SummaryFilter,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 100,
    ) -> SummaryPage:
        """Return a page of rollouts in the order of their submission, or its reverse.

        Raises:
            StoreError: The store fails.
            InvalidFieldError: The cursor is not one that an earlier page of this order returned.
        """


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Which groups to list; None stands for any."""

    state: str | None = None
    """`open`, `ready`, `batched`, `acknowledged` or `dropped`."""
    reason: str | None = None
    """Why it was dropped; only with the state `dropped`."""


class RunLists(Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
        NotFoundError: There is no such run.
    """

    async def group_page(
        self,
        run_id: str,
        which: GroupSelection,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 50,
    ) -> GroupPage:
        """Return a page of groups by number, or the highest number first.

        Raises:
            InvalidFieldError: The cursor is not one that an earlier page of this order returned.
        """

    async def history(self, run_id: str, *, points: int) -> RunHistory:
        """Return how the run went, in up to `points` intervals of about as many closed groups each."""
