"""How many groups a run wants now, and the orders that a group is made of.

Guarantees: pure functions; the same run and task give the same ids at any time, so that a step that was cut short is
made again as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import RunState, Surplus
from api_schemas.tasks import Task
from rollout_service.groups import Claim, FilterChain, Standing, wanted
from rollout_service.runs.estimates import Learned
from rollout_service.runs.task_source import Place
from rollout_service.store.runs_contract import NewGroup, OpenGroup, RunRecord


@dataclass(slots=True)
class Active:
    """A run that is being worked on."""

    run: RunRecord
    chain: FilterChain
    learned: Learned
    groups: Sequence[OpenGroup] = ()


def has_enough(run: RunRecord) -> bool:
    """Return whether what is under way is surplus, which the run does not want."""
    return run.request.surplus is Surplus.CANCEL and run.count("ready") >= run.request.batch_size


def claim(active: Active) -> Claim:
    """Return how many groups a run would begin now."""
    run, request = active.run, active.run.request
    under_way = active.learned.look(active.groups)
    if run.state is not RunState.RUNNING or run.exhausted or run.tasks == 0:
        return Claim(0)
    count = min(wanted(_standing(run), under_way, active.learned.acceptance), _left(run))
    return Claim(int(count), request.priority, request.weight)


def _left(run: RunRecord) -> float:
    """Tasks that can be taken now."""
    if run.total is not None:
        return run.total - run.cursor
    source = run.request.source
    return run.tasks - run.cursor if source.kind == "inline" and source.open else math.inf


def _standing(run: RunRecord) -> Standing:
    """What a run asks for and has; versions count from the one that it began with."""
    asked = run.request
    return Standing(
        batch_size=asked.batch_size,
        max_concurrent=asked.max_concurrent,
        eta=asked.max_staleness,
        prefetch_batches=asked.prefetch_batches if asked.surplus is Surplus.CARRY_OVER else 0,
        version=run.version - run.first_version,
        running=run.count("open"),
        ready=run.count("ready"),
        batched=run.count("batched"),
        acknowledged=run.count("acknowledged"),
    )


def new_group(run: RunRecord, place: Place, task: Task) -> NewGroup:
    """Return the group of a task, with an order for each of its samples."""
    size = run.request.group_size
    requests = [rollout_request(run, place.number, sample, task, 0) for sample in range(size)]
    return NewGroup(place.number, place.epoch, requests)


def rollout_request(run: RunRecord, number: int, sample: int, task: Task, retry: int) -> RolloutRequest:
    """Return the order for one sample of a group."""
    asked, sampling = run.request, run.request.sampling
    if sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sampling.seed + sample})
    suffix = f".{retry}" if retry else ""
    return RolloutRequest(
        rollout_id=f"{run.run_id}.{number}.{sample}{suffix}",
        task=task,
        pool=asked.pool,
        sampling=sampling,
        limits=asked.limits,
        metadata=asked.metadata,
    )


def retry_of(rollout_id: str) -> int:
    """Return how often a sample was repeated before this rollout of it; run ids hold no dots."""
    parts = rollout_id.split(".")
    return int(parts[3]) if len(parts) > 3 else 0
