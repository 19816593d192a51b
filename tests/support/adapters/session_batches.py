"""Batches of parts of live sessions, as the service would lease them, from conversations that were played."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate

import numpy as np

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.sessions import RolloutKind, SessionInfo, TurnMark
from api_schemas.runs import Batch, Group, GroupSample
from api_schemas.tasks import Task
from api_schemas.trajectories import Trajectory
from rollout_client.arrays import BatchArrays

NOW = datetime(2025, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PlayedPart:
    """A session's trajectory, of which the turns with a usable mark are trained on."""

    trajectory: Trajectory
    marks: Sequence[TurnMark]
    user: str = "u1"
    usable: bool = True


def session_batch(parts: Sequence[PlayedPart]) -> BatchArrays:
    """Return a batch with a group for each part."""
    segments = [segment for part in parts for segment in part.trajectory.segments]
    offsets = [0, *accumulate(len(segment.token_ids) for segment in segments)]
    samples = [0, *accumulate(len(part.trajectory.segments) for part in parts)]
    rewards = np.array([_reward(part) for part in parts], "<f4")
    tensors = {
        "group_offsets": np.arange(len(parts) + 1, dtype="<i8"),
        "sample_offsets": np.array(samples, "<i8"),
        "segment_offsets": np.array(offsets, "<i8"),
        "token_ids": np.concatenate([segment.token_ids for segment in segments]).astype("<i4"),
        "loss_mask": _masks(parts).astype("u1"),
        "logprobs": np.concatenate([segment.logprobs for segment in segments]).astype("<f4"),
        "versions": np.concatenate([segment.versions for segment in segments]).astype("<i4"),
        "turn_ids": np.concatenate([segment.turn_ids for segment in segments]).astype("<i4"),
        "rewards": rewards,
        "advantages": np.full(len(parts), np.nan, "<f4"),
        "usable": np.array([part.usable for part in parts], "u1"),
    }
    groups = [_group(place, part, float(rewards[place])) for place, part in enumerate(parts)]
    batch = Batch(
        batch_id="live.b0",
        run_id="live",
        number=0,
        groups=groups,
        delivery=1,
        lease_until=NOW,
        version=0,
        oldest_version=0,
        newest_version=0,
        dropped={},
    )
    return BatchArrays(batch, tensors)


def _masks(parts: Sequence[PlayedPart]) -> np.ndarray:
    masks = []
    for part in parts:
        usable = [mark.turn for mark in part.marks if mark.usable]
        masks += [
            np.isin(segment.turn_ids, usable) & (np.array(segment.loss_mask) == 1)
            for segment in part.trajectory.segments
        ]
    return np.concatenate(masks)


def _reward(part: PlayedPart) -> float:
    return float(np.mean([mark.value for mark in part.marks if mark.usable and mark.value is not None] or [0.0]))


def _group(number: int, part: PlayedPart, reward: float) -> Group:
    task = Task(environment="session", instance={"parts": [[f"s{number}", 0]]})
    session = SessionInfo(session_id=f"s{number}", user=part.user, tenant="default", opened_at=NOW, part=0)
    rollout = Rollout(
        rollout_id=f"live.{number}.0",
        state=RolloutState.COMPLETED,
        task=task,
        pool="policy",
        created_at=NOW,
        reward=reward,
        kind=RolloutKind.SESSION,
        session=session,
        turn_marks=list(part.marks),
    )
    sample = GroupSample(sample=0, rollout=rollout, usable=part.usable, reward=reward if part.usable else None)
    return Group(
        group_id=f"live.{number}",
        number=number,
        epoch=0,
        task=task,
        samples=[sample],
        usable=int(part.usable),
        reward_mean=reward,
        reward_std=0.0,
        oldest_version=0,
        newest_version=0,
    )
