"""The run manager's estimates about a run. A crash loses the estimates; decisions stay correct without them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Stage
from api_schemas.rollouts.figures import ParallelFigures
from rollout_service.groups import (
    NOT_FILTERED,
    AcceptanceRate,
    CompletionTimes,
    GroupProgress,
    parallel_figures,
    work_sums,
)
from rollout_service.store.rules import dropped_counts
from rollout_service.store.runs_contract import GroupClosure, OpenGroup, RunRecord

_MAX_CASES = 256
RECENT = 256
"""The number of rollouts that the recent figures on sub-agents cover."""


@dataclass(slots=True)
class RunEstimates:
    """The acceptance rate, the completion times and the latest use of sub-agents of one run."""

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    times: CompletionTimes = field(default_factory=CompletionTimes)
    _epoch: int | None = None
    _paths: dict[int, list[GroupProgress]] = field(default_factory=dict)
    _work: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The use of sub-agents by each of the last rollouts."""
    oldest_version: int | None = None
    """That of the tokens of the group that closed last."""
    newest_error: ErrorInfo | None = None
    """The newest one of a sample since the last group that was kept."""

    @property
    def recent_figures(self) -> ParallelFigures | None:
        """The figures on sub-agents over the last rollouts; None if there are none."""
        sums: Counter[str] = Counter()
        for one in self._work:
            sums.update(one)
        return parallel_figures(sums)

    @classmethod
    def from_record(cls, run: RunRecord) -> RunEstimates:
        """Return estimates whose acceptance rate follows from the run's counters."""
        estimates = cls()
        kept, dropped = filter_counts(run)
        cases = min(kept + dropped, _MAX_CASES)
        for case in range(cases):
            share = kept / (kept + dropped)
            estimates.acceptance.learn(kept=int((case + 1) * share) > int(case * share))
        return estimates

    def start_epoch(self, epoch: int) -> None:
        """Note that groups of this epoch start; a new epoch discounts the evidence from earlier ones."""
        if self._epoch is not None and epoch > self._epoch:
            self.acceptance.new_epoch()
        self._epoch = epoch

    def observe(self, groups: Sequence[OpenGroup]) -> Counter[GroupProgress]:
        """Record the progress of the open groups, and return how many groups are at each."""
        under_way: Counter[GroupProgress] = Counter()
        for group in groups:
            progress = group_progress(group)
            under_way[progress] += 1
            path = self._paths.setdefault(group.number, [])
            if progress.ended and progress not in path:
                path.append(progress)
        return under_way

    def record_closure(
        self, closure: GroupClosure, rollouts: Sequence[Rollout], stragglers: Sequence[bool]
    ) -> None:
        """Learn from a group that was closed; `stragglers` tells for each rollout whether it was cut off."""
        path = self._paths.pop(closure.number, [])
        self.oldest_version = closure.oldest_version
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
    """Return how many groups of a run passed its filters, and how many the filters dropped."""
    kept = sum(run.count(name) for name in ("ready", "batched", "acknowledged"))
    kept += run.count("dropped:stale")
    dropped = sum(n for reason, n in dropped_counts(run.counters).items() if reason not in NOT_FILTERED)
    return kept, dropped


def group_progress(group: OpenGroup) -> GroupProgress:
    """Return how far an open group has come."""
    ended = [member for member in group.members if member.state.terminal]
    rewards = {member.reward for member in ended if member.reward is not None}
    return GroupProgress(len(ended), len(rewards) > 1)


def rollout_seconds(rollout: Rollout) -> float:
    """Return how long the agent of a rollout worked in its last attempt."""
    return sum(
        span.seconds
        for span in rollout.spans
        if span.stage is Stage.ROLLOUT and span.attempt == rollout.attempt
    )
