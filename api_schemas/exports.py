"""A run on its way out of the service, and rollouts that are evaluated again.

An export is JSON Lines: an `ExportedRun`, an `ExportedSample` for each rollout of a closed group, an `ExportEnd`. A
file without its end was cut off.
"""

from __future__ import annotations

from itertools import compress
from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import CountOrZero, Name, RolloutId, WireModel
from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, StopReason
from api_schemas.runs import BatchId, GroupSample, Run

EXPORT_MEDIA_TYPE = "application/jsonl"
MAX_RESCORED = 4_096


class ExportedRun(WireModel):
    """The first line."""

    kind: Literal["run"] = "run"
    format: Literal[1] = 1
    run: Run


class ExportedSample(WireModel):
    """A rollout of a closed group, whatever became of the group."""

    kind: Literal["sample"] = "sample"
    group_id: RolloutId
    number: int
    """The task's number over all epochs."""
    epoch: int
    group_state: Literal["ready", "batched", "acknowledged", "dropped"]
    dropped_because: str | None
    """Set if and only if the group was dropped."""
    batch_id: BatchId | None
    """The batch that the group is in, or was acknowledged with."""
    reward_mean: float | None
    reward_std: float | None
    """Over the usable samples of the group."""
    request: RolloutRequest
    """The order that was rolled out."""
    sample: GroupSample
    """The rollout with its trajectory, which is null once it was pruned; the reward, the advantage."""
    oldest_version: int | None
    """The oldest version that sampled a token of this rollout; null when nothing was sampled."""
    newest_version: int | None


class ExportEnd(WireModel):
    """The last line."""

    kind: Literal["end"] = "end"
    samples: int
    """How many there were."""


ExportLine = Annotated[ExportedRun | ExportedSample | ExportEnd, Field(discriminator="kind")]


class RescoreOptions(WireModel):
    """How rollouts are evaluated again."""

    environment: Name | None = None
    """Another environment, such as a newer version under a name of its own; null is each rollout's own."""
    replay: Literal["needed", "always"] = "needed"
    """Whether the recorded tool calls are carried out again in a new sandbox also where the evaluation looks at nothing
    but the answer."""


class RescoreRun(RescoreOptions):
    """An order to evaluate rollouts of a run again."""

    rollout_ids: list[RolloutId] | None = Field(None, max_length=MAX_RESCORED)
    """Null is all rollouts of closed groups."""


class RecordedRollout(WireModel):
    """A rollout with its trajectory, and the order that it was rolled out for."""

    request: RolloutRequest
    rollout: Rollout
    sampled_tokens: list[CountOrZero] | None = None
    """How many tokens each turn sampled, instead of the trajectory's segments: no evaluation needs these."""


class RescoreRollouts(RescoreOptions):
    """An order to evaluate rollouts again that the caller holds, as from an export."""

    rollouts: list[RecordedRollout] = Field(max_length=MAX_RESCORED)


class Difference(WireModel):
    """A message that came out otherwise than when it was recorded."""

    turn: int
    """The turn whose prompt it is part of, counted from 0."""
    role: str
    name: str | None
    """The tool, where it is a tool's."""
    recorded: str | None
    """Null where there was none."""
    replayed: str | None


class Rescored(WireModel):
    """A rollout that was evaluated again: the new reward beside the old one."""

    rollout_id: RolloutId
    environment: Name
    """The one that evaluated it now."""
    recorded_reward: float | None
    reward: float | None
    """Null when it could not be evaluated: `error` says why."""
    reward_parts: dict[str, float] = {}
    error: ErrorInfo | None = None
    stop_reason: StopReason | None
    """As recorded."""
    replayed: bool
    """Whether its tool calls were carried out again."""
    turns_recorded: int
    turns_replayed: int
    differences: list[Difference] = []
    """In the order of the conversation; empty for a faithful replay."""


class RescoreEnd(WireModel):
    """The last line of an answer."""

    rescored: int
    failed: int
    """How many of them have an error."""


def without_tokens(request: RolloutRequest, rollout: Rollout) -> RecordedRollout:
    """What a rollout is evaluated again by: far less than it holds."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return RecordedRollout(request=request, rollout=rollout)
    sampled = [0] * len(trajectory.finish_reasons)
    for segment in trajectory.segments:
        for turn in compress(segment.turn_ids, segment.loss_mask):
            sampled[turn] += 1
    rollout = rollout.model_copy(update={"trajectory": trajectory.model_copy(update={"segments": []})})
    return RecordedRollout(request=request, rollout=rollout, sampled_tokens=sampled)
