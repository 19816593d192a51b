"""Filters that decide which groups are worth training on, and give a reason.

Guarantees: a filter sees only usable samples and no clock, so judging a group again gives the same answer. The first
filter that drops a group determines the reason; reasons are short words that can be counted.

Plug-ins subclass `GroupFilter`, or `RewardFilter` if they look at rewards, and register the class under the entry point
group `rollout_service.filters`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from api_schemas.runs.auxiliary import RewardPart
from rollout_service.groups.outcome import GroupOutcome, SampleOutcome

TOO_FEW_USABLE = "too_few_usable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a group is kept, and if not, why."""

    keep: bool
    reason: str = ""


KEEP = Verdict(keep=True)


class GroupFilter(BaseModel, ABC):
    """A filter; its fields are its options."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @abstractmethod
    def judge(self, group: GroupOutcome) -> Verdict:
        """Judge a group that has at least one usable sample."""


class RewardFilter(GroupFilter):
    """A filter that looks at one part of the rewards."""

    part: RewardPart = RewardPart.PERF
    """The part to look at. Rewards for handing on work vary almost always, so by default it is that of the outcome."""

    def rewards(self, group: GroupOutcome) -> tuple[float, ...]:
        """Return the rewards that this filter looks at, of the usable samples in order."""
        return group.values(self.part)


class ZeroVariance(RewardFilter):
    """Drops groups of equal rewards, whose advantages are all 0: DAPO's dynamic sampling (equation 11).

    A group of one sample has nothing to be compared with, and is kept: its trainer uses the reward itself.
    """

    tolerance: float = Field(1e-9, ge=0)
    """The largest difference at which rewards count as equal."""

    def judge(self, group: GroupOutcome) -> Verdict:
        rewards = self.rewards(group)
        if len(group.samples) == 1 or max(rewards) - min(rewards) > self.tolerance:
            return KEEP
        return Verdict(keep=False, reason="zero_variance")


class AllFailed(RewardFilter):
    """Drops groups in which no sample has a reward above `at_most`."""

    at_most: float = 0.0

    def judge(self, group: GroupOutcome) -> Verdict:
        if max(self.rewards(group)) > self.at_most:
            return KEEP
        return Verdict(keep=False, reason="all_failed")


class AccuracyBand(RewardFilter):
    """Keeps groups whose share of successes lies between `low` and `high`, inclusive."""

    low: float = Field(0.0, ge=0, le=1)
    high: float = Field(1.0, ge=0, le=1)
    success: float = 1.0
    """The lowest reward that counts as a success."""

    def judge(self, group: GroupOutcome) -> Verdict:
        rewards = self.rewards(group)
        accuracy = sum(reward >= self.success for reward in rewards) / len(rewards)
        if accuracy < self.low:
            return Verdict(keep=False, reason="too_hard")
        if accuracy > self.high:
            return Verdict(keep=False, reason="too_easy")
        return KEEP


class TooLong(GroupFilter):
    """Drops groups in which more than `max_share` of the samples have more than `max_tokens` sampled tokens."""

    max_tokens: int = Field(ge=1)
    max_share: float = Field(0.0, ge=0, le=1)

    def judge(self, group: GroupOutcome) -> Verdict:
        return _limit(group, lambda s: s.sampled_tokens > self.max_tokens, self.max_share, "too_long")


class MalformedCalls(GroupFilter):
    """Drops groups in which more than `max_share` of the samples have a malformed tool call."""

    max_share: float = Field(0.0, ge=0, le=1)

    def judge(self, group: GroupOutcome) -> Verdict:
        return _limit(group, lambda s: s.malformed_calls > 0, self.max_share, "malformed_calls")


class Truncated(GroupFilter):
    """Drops groups in which more than `max_share` of the samples ended at a limit."""

    max_share: float = Field(0.0, ge=0, le=1)

    def judge(self, group: GroupOutcome) -> Verdict:
        return _limit(group, lambda s: s.truncated, self.max_share, "truncated")


@dataclass(frozen=True, slots=True)
class FilterChain:
    """A minimum number of usable samples, followed by a run's filters in order."""

    filters: Sequence[GroupFilter] = (ZeroVariance(),)
    min_usable: int = 1

    @property
    def parts(self) -> list[RewardPart]:
        """The parts of the rewards that the filters look at, each once, in their order."""
        return list(dict.fromkeys(one.part for one in self.filters if isinstance(one, RewardFilter)))

    def judge(self, group: GroupOutcome) -> Verdict:
        """Return the first verdict that drops the group, or `KEEP`."""
        if len(group.usable) < max(1, self.min_usable):
            return Verdict(keep=False, reason=TOO_FEW_USABLE)
        verdicts = (one.judge(group) for one in self.filters)
        return next((verdict for verdict in verdicts if not verdict.keep), KEEP)


def _limit(
    group: GroupOutcome, counts: Callable[[SampleOutcome], bool], max_share: float, reason: str
) -> Verdict:
    share = sum(map(counts, group.usable)) / len(group.usable)
    return Verdict(keep=False, reason=reason) if share > max_share else KEEP
