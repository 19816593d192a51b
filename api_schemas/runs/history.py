"""How a run went over time, as columns, and its groups as rows."""

from __future__ import annotations

from api_schemas.base import RolloutId, Timestamp, WireModel
from api_schemas.rollouts import RolloutState
from api_schemas.runs import RunId


class RunHistory(WireModel):
    """A run over time: lists of equal length with one entry for each interval of closed groups, oldest first."""

    run_id: RunId
    at: list[Timestamp]
    """When the last group of the interval closed."""
    groups: list[int]
    """Closed groups in the interval."""
    reward_mean: list[float | None]
    """The mean of the groups' mean rewards; null if no group of the interval has one."""
    reward_std: list[float | None]
    """The mean of the standard deviations within groups."""
    acceptance: list[float | None]
    """The share of the groups that passed the filters."""
    staleness: list[float | None]
    """How many versions the groups' oldest tokens were behind the run's version when they closed, on average."""
    turns: list[float | None]
    """The mean turns of a rollout."""
    tokens: list[float | None]
    """The mean sampled tokens of a rollout."""
    failed: list[float | None]
    """The share of rollouts that failed."""
    stage_shares: dict[str, list[float | None]]
    """The share of rollouts' time by `queued`, `init`, `engine`, `tool`, `rollout` (the rest of that stage) and
    `evaluate`."""
    dropped: dict[str, list[int]] = {}
    """Dropped groups by reason."""


class GroupSampleRow(WireModel):
    """One sample of a group as a row."""

    rollout_id: RolloutId
    sample: int
    state: RolloutState
    reward: float | None = None
    error_code: str | None = None
    tokens: int | None = None


class GroupRow(WireModel):
    """A group of a run as a row."""

    number: int
    """The group's number in the run."""
    state: str
    """`open`, `ready`, `batched`, `acknowledged` or `dropped`."""
    reason: str | None = None
    """Why it was dropped."""
    batch: int | None = None
    environment: str = ""
    reward_mean: float | None = None
    reward_std: float | None = None
    closed_at: Timestamp | None = None
    samples: list[GroupSampleRow] = []


class GroupPage(WireModel):
    """A page of a run's groups."""

    groups: list[GroupRow]
    next_cursor: str | None = None
