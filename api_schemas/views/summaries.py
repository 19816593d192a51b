"""Rollouts as short rows, for lists that stay fast however many there are."""

from __future__ import annotations

from typing import Literal

from api_schemas.base import RolloutId, Timestamp, WireModel
from api_schemas.rollouts import RolloutState, StopReason

SummaryOrder = Literal["newest", "oldest"]


class RolloutSummary(WireModel):
    """A rollout as a row of a list."""

    rollout_id: RolloutId
    state: RolloutState
    environment: str
    pool: str
    run_id: str | None = None
    """The run that it belongs to; null for rollouts that were submitted one by one."""
    group: int | None = None
    """The number of its group in the run."""
    attempt: int
    reward: float | None = None
    stop_reason: StopReason | None = None
    error_code: str | None = None
    """The code of the error that ended it, or its last attempt."""
    created_at: Timestamp
    changed_at: Timestamp
    """When its state changed last; for one that has ended, its end."""
    turns: int | None = None
    """Null until it has ended, as are the next two."""
    tokens: int | None = None
    """The sampled tokens."""
    seconds: float | None = None
    """The time that the stages worked on it, over all attempts."""


class SummaryPage(WireModel):
    """A page of summaries."""

    rows: list[RolloutSummary]
    next_cursor: str | None = None
    """The `cursor` of the next page; null on the last page."""
    matching: int | None = None
    """How many rollouts match, if that is known without counting them."""


class ErrorGroup(WireModel):
    """Failures with the same code, boundary and stage, newest first."""

    code: str
    boundary: str
    stage: str | None = None
    environment: str = ""
    count: int
    last_at: Timestamp
    message: str
    """That of the newest."""
    hint: str = ""
    rollouts: list[RolloutId] = []
    """The newest of them, 5 at most."""
