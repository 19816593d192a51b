"""Rollouts for tests of stores."""

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Trajectory
from rollout_service.store import Lease
from tests.support.samples import segment, trajectory

TRAJECTORY = trajectory(
    segment(list(range(1_000)), logprobs=[-0.25] * 1_000),
    messages=[Message(role="user", content="What is 12 * 30?")],
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
