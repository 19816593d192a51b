"""Rollouts for tests of stores."""

from __future__ import annotations

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_service.store import Lease


def order(rollout_id: str) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, task=Task(environment="calc"))


def completed(lease: Lease) -> Rollout:
    """Return the result of a leased rollout that succeeded."""
    return Rollout(
        rollout_id=lease.rollout_id,
        state=RolloutState.COMPLETED,
        task=lease.request.task,
        pool=lease.request.pool,
        reward=1.0,
        created_at=lease.created_at,
    )
