"""A run `a` of four tasks in a store, and the steps by which its groups become batches."""

import json

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import Group, InlineTasks, RunRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import Trajectory
from rollout_service.store import Store
from rollout_service.store.codec.groups import group_json
from rollout_service.store.codec.trajectories import COLUMNS
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    ClosedSample,
    GroupClosure,
    NewGroup,
    NoBatch,
)
from tests.support import samples
from tests.support.store.rollouts import ended

TASKS = [Task(environment="calc", instance={"n": n}) for n in range(4)]


def run_request(**fields: object) -> RunRequest:
    """Return a request for the run with these fields changed."""
    given = {"run_id": "a", "source": InlineTasks(tasks=TASKS), "batch_size": 2, "group_size": 2}
    return RunRequest.model_validate(given | fields)


async def create_run(store: Store, **fields: object) -> None:
    """Create the run."""
    request = run_request(**fields)
    tasks = len(request.source.tasks) if isinstance(request.source, InlineTasks) else 4
    await store.runs.create(request, tasks=tasks, digest=None, version=0)


def new_group(number: int) -> NewGroup:
    """Return a group to start."""
    requests = [RolloutRequest(rollout_id=f"a.{number}.{s}", task=TASKS[number % 4]) for s in range(2)]
    return NewGroup(number, number // 4, requests)


def trajectory(version: int) -> Trajectory:
    """Return a trajectory with tokens of this version and the next."""
    return samples.trajectory(
        samples.segment([5, 6, 7], [0, 1, 1], logprobs=[0.0, -0.5, -0.25], versions=[-1, version, version + 1])
    )


async def end_all(store: Store, version: int = 0, *, made: Trajectory | None = None) -> None:
    """Complete every rollout that is queued."""
    for lease in await store.claim("w", limit=1_000, lease_seconds=1e6):
        reward = float(lease.rollout_id.endswith("1"))
        result = ended(lease, reward=reward, trajectory=made or trajectory(version))
        assert await store.finish(lease, "w", result)


async def close_group(store: Store, number: int, *, reason: str | None = None, version: int = 0) -> None:
    """Keep a group, or drop it for a reason."""
    samples = [ClosedSample(s, f"a.{number}.{s}", True, None, float(s), None) for s in range(2)]
    await store.runs.close_group("a", GroupClosure(number, reason, samples, 0.5, 0.5, version, version))


async def make_ready(store: Store, *numbers: int, version: int = 0) -> None:
    """Start these groups, complete their rollouts and keep them."""
    assert await store.runs.start_groups("a", [new_group(number) for number in numbers]) == len(numbers)
    await end_all(store, version)
    for number in numbers:
        await close_group(store, number, version=version)


async def lease_batch(store: Store, key: str = "k") -> BatchLease | NoBatch:
    """Ask for a batch."""
    return await store.runs.lease(BatchLeaseRequest("a", key, 60))


async def leased_batch(store: Store, key: str = "k") -> BatchLease:
    """Return a batch, which there must be."""
    batch = await lease_batch(store, key)
    assert isinstance(batch, BatchLease)
    return batch


def without_tokens(group: Group) -> bytes:
    """Return a group's JSON as in the JSON response, with empty token columns."""
    told = json.loads(group_json(group))
    for sample in told["samples"]:
        for segment in (sample["rollout"]["trajectory"] or {"segments": []})["segments"]:
            segment |= {name: [] for name in COLUMNS}
    return json.dumps(told, separators=(",", ":")).encode()
