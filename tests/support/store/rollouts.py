"""Rollouts for tests of stores."""

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_service.store import Lease

TRAJECTORY = Trajectory(
    segments=[
        Segment(
            token_ids=list(range(1_000)),
            loss_mask=[1] * 1_000,
            logprobs=[-0.25] * 1_000,
            versions=[3] * 1_000,
            turn_ids=[0] * 1_000,
            fork_reason=ForkReason.FIRST,
        )
    ],
    messages=[Message(role="user", content="What is 12 * 30?")],
    finish_reasons=[FinishReason.STOP],
    fork_counts={ForkReason.FIRST: 1},
)


def order(rollout_id: str) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, task=Task(environment="calc"))


def completed(lease: Lease, trajectory: Trajectory | None = None) -> Rollout:
    """Return the result of a leased rollout that succeeded."""
    return Rollout(
        rollout_id=lease.rollout_id,
        state=RolloutState.COMPLETED,
        task=lease.request.task,
        pool=lease.request.pool,
        reward=1.0,
        created_at=lease.created_at,
        trajectory=trajectory,
    )
