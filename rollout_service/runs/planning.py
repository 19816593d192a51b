"""How many groups a run may start now, and the rollout requests a group consists of.

Guarantees: pure functions; the same run and task always give the same ids, so repeating an interrupted step has no
further effect.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.rollouts import RolloutRequest, TokenExtras
from api_schemas.runs import RunState, Surplus
from api_schemas.tasks import Task
from rollout_service.base.ids import SampleId
from rollout_service.groups import AdmissionState, Claim, FilterChain, admission_capacity, groups_to_start
from rollout_service.runs.estimates import RunEstimates
from rollout_service.runs.tasks.source import TaskPosition
from rollout_service.store.runs_contract import NewGroup, OpenGroup, RunRecord

_SEEDS = 2**31
"""How many seeds there are for samples: engines take these whether they keep seeds in 32 bits or in 64."""


@dataclass(slots=True)
class ActiveRun:
    """A run that is being worked on."""

    run: RunRecord
    chain: FilterChain
    estimates: RunEstimates
    groups: Sequence[OpenGroup] = ()


def has_surplus(run: RunRecord) -> bool:
    """Return whether the groups under way are surplus that the run asks to cancel."""
    return run.request.surplus is Surplus.CANCEL and run.count("ready") >= run.request.batch_size


def claim_groups(active: ActiveRun) -> Claim:
    """Return how many groups a run would start now."""
    run, request = active.run, active.run.request
    under_way = active.estimates.observe(active.groups)
    if run.state is not RunState.RUNNING or run.exhausted or run.tasks == 0:
        return Claim(0)
    count = groups_to_start(_admission_state(run), under_way, active.estimates.acceptance)
    return Claim(int(min(count, _tasks_left(run))), request.priority, request.weight)


def waits_for_version(run: RunRecord) -> bool:
    """Return whether a run starts nothing, and has nothing to deliver, before its trainer reports a newer version."""
    under_way = any(run.count(state) for state in ("open", "ready", "batched"))
    if under_way or run.exhausted or run.state is not RunState.RUNNING:
        return False
    return run.request.max_staleness is not None and admission_capacity(_admission_state(run)) <= 0


def _tasks_left(run: RunRecord) -> float:
    """Return how many tasks can be taken now."""
    if run.total is not None:
        return run.total - run.cursor
    source = run.request.source
    return run.tasks - run.cursor if source.kind == "inline" and source.open else math.inf


def _admission_state(run: RunRecord) -> AdmissionState:
    """Return the admission state of a run; versions count from the run's first one."""
    request = run.request
    return AdmissionState(
        batch_size=request.batch_size,
        max_concurrent=request.max_concurrent,
        max_staleness=request.max_staleness,
        prefetch_batches=request.prefetch_batches if request.surplus is Surplus.CARRY_OVER else 0,
        version=run.version - run.first_version,
        running=run.count("open"),
        ready=run.count("ready"),
        batched=run.count("batched"),
        acknowledged=run.count("acknowledged"),
    )


def new_group(run: RunRecord, position: TaskPosition, task: Task) -> NewGroup:
    """Return the group of a task, with a rollout request for each of its samples."""
    size = run.request.group_size
    requests = [rollout_request(run, position.number, sample, task, 0) for sample in range(size)]
    return NewGroup(position.number, position.epoch, requests)


def rollout_request(run: RunRecord, number: int, sample: int, task: Task, retry: int) -> RolloutRequest:
    """Return the rollout request for one sample of a group."""
    request, sampling = run.request, run.request.sampling
    if sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sample_seed(sampling.seed, number, sample)})
    return RolloutRequest(
        rollout_id=str(SampleId(run.run_id, number, sample, retry)),
        task=task,
        pool=request.pool,
        sampling=sampling,
        exports=TokenExtras(nodes=request.nodes, turn_marks=request.live is not None),
        limits=request.limits,
        metadata=request.metadata,
        trace=None if request.trace is None else request.trace.model_copy(update={"link": True}),
    )


def sample_seed(seed: int, number: int, sample: int) -> int:
    """Return the seed of one sample of a run's group.

    It is the same on every machine and in every release, and differs from those of all other samples of the group.
    Groups have unrelated seeds, so a task has others in each epoch, and a run with the next seed repeats none.
    """
    first = int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest())
    return (first + sample) % _SEEDS
