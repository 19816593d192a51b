"""Rollouts as short rows, for lists that stay fast however many there are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo

from api_schemas.base import MAX_INT, Name, RolloutId, Timestamp, WireModel
from api_schemas.rollouts import BranchPoint, RolloutState, StopReason
from api_schemas.runs import RunId

SummaryOrder = Literal["newest", "oldest"]
MAX_CURSOR = 340
"""The most characters of a cursor: 20 for each shard of a store and a dot."""


def _distinct(states: list[RolloutState]) -> list[RolloutState]:
    return list(dict.fromkeys(states))


def _of_a_run(group: int | None, info: ValidationInfo) -> int | None:
    if group is not None and info.data.get("run") is None:
        raise ValueError("a group is one of a run: pass `run`, too")
    return group


class SummaryFilter(WireModel):
    """Which rollouts to list: those that all these filters select; a filter that is left out selects all."""

    # These have a `description` for FastAPI, which takes those of parameters from the fields and not from a schema.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    states: Annotated[list[RolloutState], AfterValidator(_distinct)] = Field(
        [], alias="state", description="Only rollouts in this state; may be repeated."
    )
    run: RunId | None = Field(None, description="Only rollouts of this run.")
    group: Annotated[int | None, Field(ge=0, le=MAX_INT), AfterValidator(_of_a_run)] = Field(
        None, description="Only those of this group of the run."
    )
    environment: Name | None = Field(None, description="Only rollouts in this environment.")
    error: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9_]{0,63}$",
        description="Only those that this error ended, or the last attempt of which.",
    )
    reward_min: float | None = Field(None, description="Only those with at least this reward.")
    reward_max: float | None = Field(None, description="Only those with at most this reward.")
    since: Timestamp | None = Field(None, description="Only those submitted then or later.")
    until: Timestamp | None = Field(None, description="Only those submitted before.")
    text: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
        description="Only those whose id begins with this.",
    )

    @property
    def only_states(self) -> bool:
        """Whether nothing but the state matters."""
        others = SummaryFilter.model_fields.keys() - {"states"}
        return all(getattr(self, name) is None for name in others)


class SummaryQuery(SummaryFilter):
    """Which rollouts to list, and which page of them."""

    order: SummaryOrder = Field("newest", description="Which end of the list comes first.")
    cursor: str | None = Field(
        None, max_length=MAX_CURSOR, description="The previous page's `next_cursor`, for the same order."
    )
    limit: int = Field(100, ge=1, le=1_000, description="Rollouts per page.")


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
    branch_of: Annotated[BranchPoint | None, Field(exclude_if=lambda branch: branch is None)] = None
    """Where in an earlier rollout it begins. Left out of JSON if it begins at the task."""
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
