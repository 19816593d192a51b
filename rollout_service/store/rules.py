"""The rules of runs, groups and batches as pure functions, for every store.

A store reads records, asks a rule, and writes the decision in the same transaction, so all stores decide alike. Where a
store filters rows itself for speed, the bound comes from a rule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from api_schemas.runs import InlineTasks, RunRequest, RunState, Surplus, TaskSource
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError
from rollout_service.base.ids import SampleId
from rollout_service.groups import shares
from rollout_service.groups.acceptance import oldest_allowed_version
from rollout_service.groups.filters import DELETED, NOT_FILTERED, STALE
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, NewGroup, NoBatch, ReadyGroup, RunRecord

DROPPED = "dropped:"
"""The prefix of the counters of dropped groups; the reason follows."""
WORK = "work:"
"""The prefix of the sums of how rollouts used sub-agents; the name in `groups.work_sums` follows."""
DROPPED_IN_A_ROW = "in_a_row:dropped:"
"""The prefix of the counters of groups dropped since the last one that was kept; the reason follows."""
FAILED_IN_A_ROW = "in_a_row:failed:"
"""The prefix of the counter of groups in a row that one permanent error ended; its code follows."""
OVER = frozenset({RunState.ENDED, RunState.FINISHED})


class BatchState(StrEnum):
    """The states of a batch; the last two are final."""

    LEASED = "leased"
    RETURNED = "returned"
    ACKNOWLEDGED = "acknowledged"
    DISSOLVED = "dissolved"


def oldest_allowed(run: RunRecord) -> int | None:
    """Return the oldest version that a token in a batch may have; None if the run sets no limit."""
    return oldest_allowed_version(version=run.version, max_staleness=run.request.max_staleness)


def is_stale(oldest_version: int | None, bound: int | None) -> bool:
    """Return whether tokens of this version are older than the bound; without one, nothing is stale."""
    return bound is not None and oldest_version is not None and oldest_version < bound


@dataclass(frozen=True, slots=True)
class NewBatch:
    groups: Sequence[int]
    surplus: Sequence[int] = ()
    cancels_open: bool = False
    """Whether to cancel the groups under way as surplus too."""


def next_batch(
    run: RunRecord, ready: Sequence[ReadyGroup], *, bound: int | None, due_in: float = math.inf
) -> NewBatch | NoBatch:
    """Return the next new batch of a run, or why there is none now.

    `ready` are all ready groups, in the order of their numbers, with their owners if the run has live sessions. A
    `bound` of None takes stale groups too. `due_in` is after how many seconds the next lease of another batch runs out.
    """
    if any(is_stale(group.oldest_version, bound) for group in ready):
        return NoBatch(over=False, due_in=math.inf, stale=True)
    is_last = run.exhausted and not run.count("open")
    numbers = [group.number for group in _batch(run, ready, is_last=is_last)]
    if not numbers:
        delivered = is_last and not ready and not run.count("batched")
        return NoBatch(over=run.state is RunState.FINISHED or delivered, due_in=due_in)
    if run.request.surplus is Surplus.CANCEL:
        surplus = [group.number for group in ready if group.number not in numbers]
        return NewBatch(numbers, surplus=surplus, cancels_open=True)
    return NewBatch(numbers)


def _batch(run: RunRecord, ready: Sequence[ReadyGroup], *, is_last: bool) -> Sequence[ReadyGroup]:
    """Return the groups of the next batch; none if they do not fill it, unless it is the last one."""
    size, live = run.request.batch_size, run.request.live
    if live is not None:
        return shares.next_batch(ready, size, live, is_last=is_last)
    return ready[:size] if is_last or len(ready) >= size else []


def dropped_counts(counters: Mapping[str, int]) -> dict[str, int]:
    return _with_prefix(counters, DROPPED)


def group_counts(counters: Mapping[str, int]) -> dict[str, int]:
    others = (WORK, DROPPED_IN_A_ROW, FAILED_IN_A_ROW)
    return {name: n for name, n in counters.items() if not name.startswith(others)}


def work_counts(counters: Mapping[str, int]) -> dict[str, int]:
    return _with_prefix(counters, WORK)


def dropped_in_a_row(counters: Mapping[str, int]) -> dict[str, int]:
    return _with_prefix(counters, DROPPED_IN_A_ROW)


def failed_in_a_row(counters: Mapping[str, int]) -> dict[str, int]:
    """Return at most one count, by the error's code."""
    return _with_prefix(counters, FAILED_IN_A_ROW)


def _with_prefix(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)}


def added_counts(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much counts have grown, without zeros."""
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


def masked_counts(samples: Sequence[ClosedSample], before: Sequence[ClosedSample] | None = None) -> dict[str, int]:
    """Return what to add to a run's counters; `before` are the group's samples at an earlier close."""
    counted = {sample.sample for sample in before or () if not sample.usable}
    added = [sample for sample in samples if sample.sample not in counted]
    counts = {
        "masked": sum(not sample.usable for sample in added),
        "masked:stale": sum(sample.masked_because == STALE for sample in added),
    }
    return {name: count for name, count in counts.items() if count}


def closing_counts(closure: GroupClosure, counters: Mapping[str, int]) -> dict[str, int]:
    """Return what to add to a run's counters at the first close."""
    added = {name: count for name, count in closure.counts.items() if count}
    return masked_counts(closure.samples) | added | _in_a_row_counts(closure, counters)


def _in_a_row_counts(closure: GroupClosure, counters: Mapping[str, int]) -> dict[str, int]:
    if closure.reason is None:
        return restart_counts(counters)
    if closure.reason in NOT_FILTERED:
        return {}
    counts = {DROPPED_IN_A_ROW + closure.reason: 1}
    if closure.failure is not None:
        counts[FAILED_IN_A_ROW + closure.failure] = 1
    others = restart_counts(counters, FAILED_IN_A_ROW)
    return {name: count for name, count in others.items() if name not in counts} | counts


def restart_counts(counters: Mapping[str, int], *prefixes: str) -> dict[str, int]:
    """Return what to add to a run's counters so that those of groups in a row, or of these prefixes, are zero."""
    given = prefixes or (DROPPED_IN_A_ROW, FAILED_IN_A_ROW)
    return {name: -count for name, count in counters.items() if name.startswith(given)}


def ends_problem(run: RunRecord, closure: GroupClosure) -> bool:
    """Return whether a group ends the problem of a run that goes on: that none was kept."""
    return closure.reason is None and run.problem is not None and run.state is RunState.RUNNING


def delivered_rollouts(samples: Sequence[ClosedSample]) -> list[str]:
    """Return the rollouts whose tokens are delivered: all but the stale ones."""
    return [sample.rollout_id for sample in samples if sample.masked_because != STALE]


def first_rollouts(rollout_ids: Iterable[str]) -> list[str]:
    """Return the first rollout of each sample that these belong to."""
    return sorted({str(replace(SampleId.parse(one), retry=0)) for one in rollout_ids})


def not_erased(samples: Sequence[ClosedSample]) -> list[str]:
    """Return the rollouts of samples that were not erased when a group's closure was decided."""
    return [sample.rollout_id for sample in samples if sample.masked_because != DELETED]


def without_erased(
    samples: Sequence[ClosedSample], rollout_ids: Collection[str], *, is_settled: bool
) -> list[ClosedSample]:
    """Mask the samples whose rollouts were erased, and take away their owner.

    The samples of a settled group are history, so these only lose their owner.
    """

    def erased(sample: ClosedSample) -> ClosedSample:
        sample = replace(sample, owner=None)
        if is_settled:
            return sample
        return replace(sample, usable=False, masked_because=DELETED, reward=None, advantage=None)

    return [erased(sample) if sample.rollout_id in rollout_ids else sample for sample in samples]


def is_worth_keeping(samples: Sequence[ClosedSample], request: RunRequest) -> bool:
    return sum(sample.usable for sample in samples) >= max(1, request.min_usable)


def total_tasks(source: TaskSource, tasks: int) -> int | None:
    """Return the tasks over all epochs; None while they are unbounded."""
    if isinstance(source, InlineTasks) and source.open:
        return None
    return None if source.epochs is None else source.epochs * tasks


def is_finished(run: RunRecord) -> bool:
    """Return whether a run has taken all its tasks and every batch of it is acknowledged."""
    if run.state in OVER or run.total is None or run.cursor < run.total:
        return False
    return not any(run.count(state) for state in ("open", "ready", "batched"))


def next_state(run: RunRecord, requested: RunState | None) -> RunState:
    """Return the state of a run after a request to change it; None requests no change.

    Raises:
        ConflictError: The run is over and cannot be paused or resumed.
    """
    if requested is None or requested is run.state:
        return run.state
    if run.state not in OVER:
        return requested
    if requested is not RunState.ENDED:
        raise ConflictError(f"the run {run.run_id} is {run.state}", hint="Create a new run.")
    return run.state


def can_start(run: RunRecord, groups: Sequence[NewGroup]) -> bool:
    return run.state is RunState.RUNNING and bool(groups) and groups[0].number == run.cursor


def check_append(run: RunRecord, offset: int) -> None:
    """
    Raises:
        ConflictError: Tasks cannot be appended to the run at this offset.
    """
    if not _may_grow(run) or run.total is not None or run.state in OVER:
        raise ConflictError(
            f"the run {run.run_id} takes no more tasks",
            hint="You can append only to a run whose inline source is `open` and that was not closed.",
        )
    if offset != run.tasks:
        raise ConflictError(
            f"the run {run.run_id} has {run.tasks} tasks, not {offset}",
            hint="Append at the run's current number of tasks, or omit the offset.",
            context={"tasks": run.tasks},
        )


def _may_grow(run: RunRecord) -> bool:
    source = run.request.source
    return isinstance(source, InlineTasks) and source.open


def is_appended(
    run: RunRecord, there: Sequence[Task], tasks: Sequence[Task], *, offset: int | None, close: bool
) -> bool:
    """Return whether tasks were appended before: the same are `there`, and the run is as open as it is to be.

    Closing a run without any is repeated at the end of its tasks.
    """
    is_same = list(there) == list(tasks) if tasks else close and offset == run.tasks and _may_grow(run)
    return is_same and (run.total is not None) == close


def check_acknowledge(batch_id: str, state: BatchState) -> bool:
    """Return False for a batch that is acknowledged already.

    Raises:
        ConflictError: The batch was dissolved.
    """
    if state is BatchState.DISSOLVED:
        raise ConflictError(
            f"the batch {batch_id} was dissolved: its lease had expired or been returned, "
            "and one of its groups had become too old",
            hint="Do not count it as trained. Acknowledge within the lease, or lease for longer.",
        )
    return state is not BatchState.ACKNOWLEDGED


def check_renewal(batch_id: str, state: BatchState, *, holder: str | None, key: str | None) -> None:
    """
    Raises:
        ConflictError: The lease cannot be renewed with this key; None stands for any key.
    """
    if state is BatchState.LEASED and key in (None, holder):
        return
    why = "leased by another consumer" if state is BatchState.LEASED else str(state)
    raise ConflictError(
        f"the batch {batch_id} is {why}",
        hint="Its lease expired or was returned. Do not count it as trained unless it is acknowledged.",
    )


def check_return(batch_id: str, state: BatchState, *, holder: str | None, key: str | None) -> bool:
    """Return False for a batch that is free already.

    Raises:
        ConflictError: The batch is acknowledged, or leased under another key; None stands for any key.
    """
    if state is BatchState.LEASED and key not in (None, holder):
        raise ConflictError(
            f"the batch {batch_id} is leased by another consumer",
            hint="Your lease expired, and the batch was delivered again; there is nothing to return.",
        )
    if state is BatchState.ACKNOWLEDGED:
        raise ConflictError(
            f"the batch {batch_id} is acknowledged", hint="An acknowledged batch is never delivered again."
        )
    return state is BatchState.LEASED


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """A group that was acknowledged or dropped, and that still has its trajectories."""

    number: int
    bytes: int
    settled_at: float
    """Unix seconds."""


def groups_to_prune(
    settled: Sequence[SettledGroup], *, seconds: float | None, max_bytes: int | None, now: float
) -> list[int]:
    """Return the groups beyond an age, and the oldest beyond a total size.

    `settled` is ordered from newest to oldest; None sets no limit.
    """
    held, pruned = 0, []
    for group in settled:
        held += group.bytes
        is_too_old = seconds is not None and group.settled_at <= now - seconds
        if is_too_old or (max_bytes is not None and held > max_bytes):
            pruned.append(group.number)
    return pruned
