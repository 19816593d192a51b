"""Estimates about a run, how many groups it may start now, and the rollout requests a group consists of.

These are pure functions of the store's counters, so a restart changes nothing. The same run and task always give the
same ids, so repeating an interrupted step has no further effect.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import BranchPoint, Rollout, RolloutRequest, Stage, TokenExtras
from api_schemas.rollouts.figures import ParallelFigures
from api_schemas.runs import RunState, Surplus
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError, EnvironmentFailedError, RequestError, describe
from rollout_service.base.ids import SampleId
from rollout_service.groups.acceptance import (
    AcceptanceRate,
    AdmissionState,
    GroupProgress,
    admission_capacity,
    groups_to_start,
)
from rollout_service.groups.filters import NOT_FILTERED, TOO_FEW_USABLE, FilterChain
from rollout_service.groups.scheduler import Claim, CompletionTimes
from rollout_service.groups.statistics import parallel_figures, work_sums
from rollout_service.runs.dataset import TaskPosition
from rollout_service.store.rules import dropped_counts, dropped_in_a_row, failed_in_a_row, oldest_allowed
from rollout_service.store.runs_contract import GroupClosure, NewGroup, OpenGroup, RunRecord

RECENT = 256
"""How many rollouts the recent figures on sub-agents cover."""


@dataclass(slots=True)
class RunEstimates:
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    times: CompletionTimes = field(default_factory=CompletionTimes)
    _epoch: int | None = None
    _paths: dict[int, list[GroupProgress]] = field(default_factory=dict)
    _work: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The use of sub-agents by each of the last rollouts."""
    oldest_version: int | None = None
    """The oldest version in the group that closed last."""
    newest_version: int | None = None
    """The newest version in it; None if all its samples are masked."""
    tried_at: float = -math.inf
    """When a group last began although the engines were too old for the run, on the event loop's clock."""
    newest_error: ErrorInfo | None = None
    """The newest error of a sample since the last group that was kept."""

    @property
    def recent_figures(self) -> ParallelFigures | None:
        """The figures on sub-agents over the last rollouts; None if there are none."""
        sums: Counter[str] = Counter()
        for one in self._work:
            sums.update(one)
        return parallel_figures(sums)

    @classmethod
    def from_record(cls, run: RunRecord) -> RunEstimates:
        """Derive the acceptance rate from the run's counters."""
        return cls(AcceptanceRate.from_counts(*filter_counts(run)))

    def start_epoch(self, epoch: int) -> None:
        """Note that groups of this epoch start; a new epoch discounts the evidence from earlier ones."""
        if self._epoch is not None and epoch > self._epoch:
            self.acceptance.new_epoch()
        self._epoch = epoch

    def observe(self, groups: Sequence[OpenGroup]) -> Counter[GroupProgress]:
        """Record the progress of the open groups, and return how many are at each."""
        under_way: Counter[GroupProgress] = Counter()
        for group in groups:
            progress = group_progress(group)
            under_way[progress] += 1
            path = self._paths.setdefault(group.number, [])
            if progress.ended and progress not in path:
                path.append(progress)
        return under_way

    def record_closure(self, closure: GroupClosure, rollouts: Sequence[Rollout], stragglers: Sequence[bool]) -> None:
        """Learn from a group that was closed; `stragglers` tells for each rollout whether it was cut off."""
        path = self._paths.pop(closure.number, [])
        self.oldest_version, self.newest_version = closure.oldest_version, closure.newest_version
        if closure.reason not in NOT_FILTERED:
            self.acceptance.learn(kept=closure.reason is None, path=path)
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        if closure.reason is None:
            self.newest_error = None
        elif errors:
            self.newest_error = errors[-1]
        self._work.extend(sums for rollout in rollouts if (sums := work_sums([rollout])))
        for rollout, is_straggler in zip(rollouts, stragglers, strict=True):
            if is_straggler and rollout.reward is None:
                self.times.add_cut_off()
            elif rollout.reward is not None:
                self.times.add(rollout_seconds(rollout))


def filter_counts(run: RunRecord) -> tuple[int, int]:
    """Return how many groups the filters kept, and how many they dropped."""
    kept = sum(run.count(name) for name in ("ready", "batched", "acknowledged"))
    kept += run.count("dropped:stale")
    dropped = sum(n for reason, n in dropped_counts(run.counters).items() if reason not in NOT_FILTERED)
    return kept, dropped


def group_progress(group: OpenGroup) -> GroupProgress:
    ended = [member for member in group.members if member.state.terminal]
    rewards = {member.reward for member in ended if member.reward is not None}
    return GroupProgress(len(ended), len(rewards) > 1)


def rollout_seconds(rollout: Rollout) -> float:
    """Return how long the agent worked in the last attempt."""
    return sum(
        span.seconds for span in rollout.spans if span.stage is Stage.ROLLOUT and span.attempt == rollout.attempt
    )


_SEEDS = 2**31
"""The number of seeds: engines accept these whether they keep seeds in 32 bits or in 64."""


@dataclass(slots=True)
class ActiveRun:
    run: RunRecord
    chain: FilterChain
    estimates: RunEstimates
    groups: Sequence[OpenGroup] = ()
    most: float = math.inf
    """The most groups that it may start now, since its engines are too old."""


def has_surplus(run: RunRecord) -> bool:
    """Return whether groups under way are surplus that the run asks to cancel."""
    return run.request.surplus is Surplus.CANCEL and run.count("ready") >= run.request.batch_size


def claim_groups(active: ActiveRun) -> Claim:
    run, request = active.run, active.run.request
    under_way = active.estimates.observe(active.groups)
    if run.state is not RunState.RUNNING or run.exhausted or run.tasks == 0:
        return Claim(0)
    count = groups_to_start(_admission_state(run), under_way, active.estimates.acceptance)
    return Claim(int(min(count, active.most, _tasks_left(run))), request.priority, request.weight)


def _tasks_left(run: RunRecord) -> float:
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
    """Return the group of a task, with a request for each sample that runs from the task."""
    branching = run.request.branching
    size = run.request.group_size if branching is None else branching.roots
    requests = [rollout_request(run, position.number, sample, task, 0) for sample in range(size)]
    return NewGroup(position.number, position.epoch, requests)


def rollout_request(
    run: RunRecord, number: int, sample: int, task: Task, retry: int, branch_of: BranchPoint | None = None
) -> RolloutRequest:
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
        branch_of=branch_of,
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


REPORT_AFTER = 20
"""How many groups in a row are dropped before the run says so: with one group in five kept, that is a chance of 1 %."""
REFUSE_AFTER = 256
"""How many groups in a row are dropped before a lease is refused although the run goes on: at the lowest acceptance
rate that is assumed, 2 %, that is a chance of 0.6 %."""

_HINTS = {
    "zero_variance": "All samples of a group get the same reward: look at what the grader gives, and whether the tasks "
    "are too hard or too easy. The filter `zero_variance` can be left out.",
    TOO_FEW_USABLE: "Its samples fail: GET /v1/runs/{run}/groups?state=dropped has their errors.",
}
_HINT = "GET /v1/runs/{run}/groups?state=dropped has the groups; look at the run's filters and tasks."


class GroupsDroppedError(RequestError):
    """Groups in a row were dropped, so that the run delivers nothing."""

    code = "groups_dropped"


class GroupsFailedError(EnvironmentFailedError):
    """All samples of groups in a row ended in the same permanent error."""

    code = "groups_failed"


class RunStoppedError(ConflictError):
    """The run delivers nothing until a person has solved its problem."""

    code = "run_stopped"


def reason_to_pause(run: RunRecord, last: ErrorInfo | None) -> GroupsDroppedError | GroupsFailedError | None:
    """Return why a run should be paused, by its limits; `last` is the newest error of a sample, if it is known.

    Groups of equal rewards never pause a run that sets no limit to them: a policy may need time to learn.
    """
    request = run.request
    for code, count in failed_in_a_row(run.counters).items():
        if request.max_failed_in_a_row is not None and count >= request.max_failed_in_a_row:
            return _failed(count, code, last)
    if request.max_dropped_in_a_row is not None:
        return _dropped(run, last, at_least=request.max_dropped_in_a_row)
    return None


def reason_to_report(run: RunRecord, last: ErrorInfo | None) -> GroupsDroppedError | None:
    """Return the error to report for a run that goes on; `last` is the newest error of a sample, if it is known."""
    return _dropped(run, last, at_least=REPORT_AFTER)


def reason_to_refuse(run: RunRecord) -> RunStoppedError | None:
    """Return why waiting for a batch is vain; None if one may come without anybody's doing."""
    if run.problem is None or run.count("batched"):
        return None
    if run.state is RunState.PAUSED and not run.count("open"):
        said = "is paused"
    elif run.state is RunState.RUNNING and sum(dropped_in_a_row(run.counters).values()) >= REFUSE_AFTER:
        said = "delivers nothing"
    else:
        return None
    return RunStoppedError(
        f"the run {run.run_id} {said}: {run.problem.message}",
        hint=run.problem.hint,
        context={"problem": run.problem.model_dump(mode="json")},
    )


def problem_of(run: RunRecord) -> ErrorInfo | None:
    """Return a run's stored problem, or that it took all its tasks and delivered nothing."""
    if run.state is not RunState.FINISHED:
        return run.problem
    if run.tasks == 0 or run.count("batches:acknowledged"):
        return None
    reasons = dropped_counts(run.counters)
    error = GroupsDroppedError(
        f"the run took all its tasks and delivered no batch: no group was kept of {_reasons(reasons)}",
        hint=_hint(run, reasons),
    )
    return run.problem or describe(error)


def warnings_of(run: RunRecord) -> list[str]:
    """Return the conditions that keep a run from delivering although nothing is wrong."""
    under_way = any(run.count(state) for state in ("open", "ready", "batched"))
    if under_way or run.exhausted or run.state is not RunState.RUNNING or run.request.max_staleness is None:
        return []
    if admission_capacity(_admission_state(run)) > 0:
        return []
    return [
        f"max_staleness: all groups that version {run.version} allows are acknowledged, and no more begin until the "
        "trainer reports a newer version, by POST /v1/weights, a PATCH of the run, or the `version` of a lease."
    ]


def behind_warning(run: RunRecord, served: int) -> str:
    """Return the warning for a run whose engines sample tokens that it refuses as too old."""
    return (
        f"max_staleness: the pool {run.request.pool!r} serves version {served}, the trainer has reported version "
        f"{run.version}, and tokens older than {oldest_allowed(run)} are refused. Until the pool has newer weights, by "
        "POST /v1/weights, only single groups are tried. A trainer that went back to an older checkpoint needs a new "
        "run."
    )


def _dropped(run: RunRecord, last: ErrorInfo | None, *, at_least: int) -> GroupsDroppedError | None:
    reasons = dropped_in_a_row(run.counters)
    if sum(reasons.values()) < at_least:
        return None
    example = "" if last is None else f"; the newest error is {last.code}: {last.message}"
    message = f"no group was kept of the last {_reasons(reasons)}{example}"
    return GroupsDroppedError(message, hint=_hint(run, reasons))


def _failed(count: int, code: str, last: ErrorInfo | None) -> GroupsFailedError:
    message = f"every sample of {count} groups in a row ended in {code}"
    return GroupsFailedError(
        f"{message}: {last.message}" if last is not None and last.code == code else message,
        hint="Mend the environment or its tasks, then resume the run. "
        "`max_failed_in_a_row` says how many such groups there may be.",
    )


def _reasons(reasons: Mapping[str, int]) -> str:
    """Return a text such as `20 (18 zero_variance, 2 too_few_usable)`."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return f"{sum(reasons.values())} ({', '.join(f'{count} {reason}' for reason, count in ordered)})"


def _hint(run: RunRecord, reasons: Mapping[str, int]) -> str:
    """Return advice on the most frequent reason."""
    most = max(reasons, key=lambda reason: reasons[reason], default="")
    return _HINTS.get(most, _HINT).format(run=run.run_id)
