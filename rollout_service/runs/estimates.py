"""What a manager learns of a run: it makes decisions better, and losing it in a crash makes none wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from api_schemas.rollouts import Rollout, Stage
from rollout_service.groups import AcceptanceRate, CompletionTimes, Progress
from rollout_service.store.runs_contract import GroupClosure, OpenGroup, RunRecord
from rollout_service.store.sqlite.batch_statements import dropped_counts

NOT_JUDGED = frozenset({"stale", "surplus", "cancelled"})
"""Reasons that say nothing about whether a group was informative."""
_REMEMBERED = 256


@dataclass(slots=True)
class Learned:
    """The figures of one run."""

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    times: CompletionTimes = field(default_factory=CompletionTimes)
    _epoch: int | None = None
    _paths: dict[int, list[Progress]] = field(default_factory=dict)

    @classmethod
    def restored(cls, run: RunRecord) -> Learned:
        """The acceptance rate as the counts of a run tell it."""
        learned = cls()
        kept, dropped = judged(run)
        cases = min(kept + dropped, _REMEMBERED)
        for case in range(cases):
            share = kept / (kept + dropped)
            learned.acceptance.learn(kept=int((case + 1) * share) > int(case * share))
        return learned

    def reached(self, epoch: int) -> None:
        """Groups of an epoch begin; in a new one, what was learned of the same tasks before counts less."""
        if self._epoch is not None and epoch > self._epoch:
            self.acceptance.new_epoch()
        self._epoch = epoch

    def look(self, groups: Sequence[OpenGroup]) -> Counter[Progress]:
        """How many groups have shown what so far."""
        under_way: Counter[Progress] = Counter()
        for group in groups:
            progress = shown(group)
            under_way[progress] += 1
            path = self._paths.setdefault(group.number, [])
            if progress.ended and progress not in path:
                path.append(progress)
        return under_way

    def closed(self, closure: GroupClosure, rollouts: Sequence[Rollout], cut: Sequence[bool]) -> None:
        """A group was closed."""
        path = self._paths.pop(closure.number, [])
        if closure.reason not in NOT_JUDGED:
            self.acceptance.learn(kept=closure.reason is None, path=path)
        for rollout, was_cut in zip(rollouts, cut, strict=True):
            if was_cut and rollout.reward is None:
                self.times.add_cut_off()
            elif rollout.reward is not None:
                self.times.add(rolling_seconds(rollout))


def judged(run: RunRecord) -> tuple[int, int]:
    """How many groups of a run passed its filters, and how many they dropped."""
    kept = sum(run.count(name) for name in ("ready", "batched", "acknowledged"))
    kept += run.count("dropped:stale")
    dropped = sum(n for reason, n in dropped_counts(run.counters).items() if reason not in NOT_JUDGED)
    return kept, dropped


def shown(group: OpenGroup) -> Progress:
    """What a group under way has shown."""
    ended = [member for member in group.members if member.state.terminal]
    rewards = {member.reward for member in ended if member.reward is not None}
    return Progress(len(ended), len(rewards) > 1)


def rolling_seconds(rollout: Rollout) -> float:
    """How long the agent of a rollout worked in its last attempt."""
    return sum(
        span.seconds
        for span in rollout.spans
        if span.stage is Stage.ROLLOUT and span.attempt == rollout.attempt
    )
