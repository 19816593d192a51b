"""Rollouts for tests of stores."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Trajectory
from rollout_service.base.errors import StoreError
from rollout_service.store import Lease, Store
from tests.support.samples import segment, trajectory

T = TypeVar("T")
ENGINE_GONE = ErrorInfo(code="engine_gone", boundary=Boundary.INFERENCE, message="gone", retryable=True)
TRAJECTORY = trajectory(
    segment(list(range(1_000)), logprobs=[-0.25] * 1_000),
    messages=[Message(role="user", content="What is 12 * 30?")],
)


def order(
    rollout_id: str = "r1", environment: str = "calc", *, pool: str = "policy", **instance: Any
) -> RolloutRequest:
    task = Task(environment=environment, instance=instance)
    return RolloutRequest(rollout_id=rollout_id, task=task, pool=pool)


def ended(lease: Lease, state: RolloutState = RolloutState.COMPLETED, **fields: Any) -> Rollout:
    """Return the result of a leased rollout; one that failed lost its engine."""
    error = ENGINE_GONE if state is RolloutState.FAILED else None
    of_lease = {"task": lease.request.task, "pool": lease.request.pool, "created_at": lease.created_at}
    return Rollout(rollout_id=lease.rollout_id, state=state, **{"error": error, **of_lease, **fields})


def completed(lease: Lease, trajectory: Trajectory | None = None) -> Rollout:
    """Return the result of a leased rollout that succeeded."""
    return ended(lease, reward=1.0, trajectory=trajectory)


async def leased(store: Store, rollout_id: str, owner: str = "worker") -> Lease:
    """Submit a rollout and lease it."""
    await store.submit(order(rollout_id))
    (lease,) = await store.claim(owner, limit=1, lease_seconds=100)
    return lease


async def finish(store: Store, *names: str, owner: str = "worker") -> None:
    """Submit rollouts, and finish each with a trajectory."""
    for name in names:
        lease = await leased(store, name, owner)
        assert await store.finish(lease, owner, completed(lease, TRAJECTORY))


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while the store fails, as its callers do."""
    with anyio.fail_after(60):
        while True:
            try:
                return await call()
            except StoreError:
                await anyio.sleep(0.05)
