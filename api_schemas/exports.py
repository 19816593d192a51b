"""Exports of runs, and requests to evaluate rollouts again.

An export is JSON Lines: an `ExportedRun`, an `ExportedSample` for each rollout of a closed group, and an `ExportEnd`. A
file without an `ExportEnd` was truncated. Runs that ask for sub-agents or live sessions are exported in the format 2:
an `ExportedNode` for each of a rollout's sub-agents follows its `ExportedSample`, and rollouts have their turns' marks.
Whoever does not need nodes skips their lines.
"""

from __future__ import annotations

from itertools import compress
from typing import Annotated, Literal

from pydantic import Field

from api_schemas.base import CountOrZero, Name, RolloutId, WireModel
from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, StopReason
from api_schemas.rollouts.trees import AgentNode
from api_schemas.runs import BatchId, GroupSample, Run
from api_schemas.runs.auxiliary import RewardPart

EXPORT_MEDIA_TYPE = "application/jsonl"
MAX_RESCORED = 4_096


class ExportedRun(WireModel):
    """The first line of an export."""

    kind: Literal["run"] = "run"
    format: Literal[1, 2] = 1
    """2 if, and only if, the run asks for sub-agents (`nodes`), or for live sessions (`live`)."""
    run: Run


class ExportedSample(WireModel):
    """A rollout of a closed group, kept or dropped."""

    kind: Literal["sample"] = "sample"
    group_id: RolloutId
    number: int
    """The task's number over all epochs."""
    epoch: int
    group_state: Literal["ready", "batched", "acknowledged", "dropped"]
    dropped_because: str | None
    """Why the group was dropped; null unless it was."""
    batch_id: BatchId | None
    """The batch that the group is in, or was acknowledged with."""
    reward_mean: float | None
    """The mean reward of the group's usable samples."""
    reward_std: float | None
    """The standard deviation of the rewards of the group's usable samples."""
    measured_on: Annotated[RewardPart | None, Field(exclude_if=lambda part: part is None)] = None
    """The part of the reward that both look at; left out of JSON if the run has no auxiliary reward."""
    request: RolloutRequest
    """The request that the rollout carried out."""
    sample: GroupSample
    """The rollout, its reward and its advantage. The trajectory is null if it was pruned. In a file, the rollout has no
    `nodes`: they are lines of their own."""
    oldest_version: int | None
    """The oldest version that sampled a token of this rollout; null if nothing was sampled."""
    newest_version: int | None
    """The newest version that sampled a token of this rollout; null if nothing was sampled."""


class ExportedNode(WireModel):
    """A sub-agent of the rollout in the last sample before it."""

    kind: Literal["node"] = "node"
    rollout_id: RolloutId
    node: AgentNode


class ExportEnd(WireModel):
    """The last line of an export."""

    kind: Literal["end"] = "end"
    samples: int
    """The number of samples in the export."""


ExportLine = Annotated[ExportedRun | ExportedSample | ExportedNode | ExportEnd, Field(discriminator="kind")]


class RescoreOptions(WireModel):
    """Options for evaluating rollouts again."""

    environment: Name | None = None
    """Another environment to evaluate with, such as a newer version; null means each rollout's own."""
    replay: Literal["needed", "always"] = "needed"
    """When to repeat the recorded tool calls in a new sandbox: `needed` leaves them out if the evaluation looks only at
    the answer."""


class RescoreRun(RescoreOptions):
    """A request to evaluate rollouts of a run again."""

    rollout_ids: list[RolloutId] | None = Field(None, max_length=MAX_RESCORED)
    """The rollouts to evaluate; null means all rollouts of closed groups."""


class RecordedRollout(WireModel):
    """A rollout with its trajectory, and the request that it carried out."""

    request: RolloutRequest
    rollout: Rollout
    sampled_tokens: list[CountOrZero] | None = None
    """The number of tokens that each turn sampled. It replaces the trajectory's segments, which no evaluation needs."""


class RescoreRollouts(RescoreOptions):
    """A request to evaluate the enclosed rollouts again, for example those of an export."""

    rollouts: list[RecordedRollout] = Field(max_length=MAX_RESCORED)


class Difference(WireModel):
    """A message that differs between the recording and the replay."""

    turn: int
    """The turn whose prompt contains the message, counted from 0."""
    role: str
    name: str | None
    """The tool's name, if it is a tool's message."""
    recorded: str | None
    """The recorded text; null if there was no such message."""
    replayed: str | None
    """The text in the replay; null if there was no such message."""


class Rescored(WireModel):
    """A rollout that was evaluated again, with its new and its old reward."""

    rollout_id: RolloutId
    environment: Name
    """The environment that evaluated it this time."""
    recorded_reward: float | None
    """The old reward."""
    reward: float | None
    """The new reward; null if the rollout could not be evaluated, for the reason in `error`."""
    reward_parts: dict[str, float] = {}
    error: ErrorInfo | None = None
    stop_reason: StopReason | None
    """The recorded reason why the agent stopped."""
    replayed: bool
    """Whether the recorded tool calls were repeated."""
    turns_recorded: int
    turns_replayed: int
    differences: list[Difference] = []
    """The differences in the order of the conversation; empty for a faithful replay."""


class RescoreEnd(WireModel):
    """The last line of the response."""

    rescored: int
    """The number of results before this line."""
    failed: int
    """The number of results with an error."""


def without_tokens(request: RolloutRequest, rollout: Rollout) -> RecordedRollout:
    """Return the part of a rollout that an evaluation needs, without the tokens that are most of it."""
    if rollout.nodes:
        nodes = [node.model_copy(update={"trajectory": None}) for node in rollout.nodes]
        rollout = rollout.model_copy(update={"nodes": nodes})
    trajectory = rollout.trajectory
    if trajectory is None:
        return RecordedRollout(request=request, rollout=rollout)
    sampled = [0] * len(trajectory.finish_reasons)
    for segment in (*trajectory.segments, *trajectory.untrained):
        for turn in compress(segment.turn_ids, segment.loss_mask):
            sampled[turn] += 1
    without = trajectory.model_copy(update={"segments": [], "untrained": []})
    rollout = rollout.model_copy(update={"trajectory": without})
    return RecordedRollout(request=request, rollout=rollout, sampled_tokens=sampled)
