"""Which groups are worth training on: filters that answer `keep` and a reason.

Guarantees: a filter looks at usable samples only and never at the clock, so that judging a group again gives the same
answer. The first filter that drops a group gives the reason; reasons are short words that can be counted.

A third party writes a `GroupFilter` and names it in the entry points `rollout_service.filters`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from rollout_service.groups.outcome import GroupOutcome, SampleOutcome

TOO_FEW_USABLE = "too_few_usable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a group is kept; if not, why."""

    keep: bool
    reason: str = ""


KEEP = Verdict(keep=True)


class GroupFilter(BaseModel, ABC):
    """A filter; its fields are its options."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @abstractmethod
    def judge(self, group: GroupOutcome) -> Verdict:
        """Whether to keep a group that has at least one usable sample."""


class ZeroVariance(GroupFilter):
    """Drops groups whose rewards do not differ, which have no advantage: DAPO's dynamic sampling (equation 11)."""

    tolerance: float = Field(1e-9, ge=0)
    """Rewards that lie this close together count as equal."""

    def judge(self, group: GroupOutcome) -> Verdict:
        if max(group.rewards) - min(group.rewards) > self.tolerance:
            return KEEP
        return Verdict(keep=False, reason="zero_variance")


class AllFailed(GroupFilter):
    """Drops groups in which no sample scored more than `at_most`."""

    at_most: float = 0.0

    def judge(self, group: GroupOutcome) -> Verdict:
        if max(group.rewards) > self.at_most:
            return KEEP
        return Verdict(keep=False, reason="all_failed")


class AccuracyBand(GroupFilter):
    """Keeps groups whose share of successes lies between `low` and `high`, both included."""

    low: float = Field(0.0, ge=0, le=1)
    high: float = Field(1.0, ge=0, le=1)
    success: float = 1.0
    """The reward from which on a sample is a success."""

    def judge(self, group: GroupOutcome) -> Verdict:
        accuracy = sum(reward >= self.success for reward in group.rewards) / len(group.rewards)
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
    """Drops groups in which more than `max_share` of the samples have a tool call that could not be parsed."""

    max_share: float = Field(0.0, ge=0, le=1)

    def judge(self, group: GroupOutcome) -> Verdict:
        return _limit(group, lambda s: s.malformed_calls > 0, self.max_share, "malformed_calls")


class Truncated(GroupFilter):
    """Drops groups in which more than `max_share` of the samples were ended by a limit."""

    max_share: float = Field(0.0, ge=0, le=1)

    def judge(self, group: GroupOutcome) -> Verdict:
        return _limit(group, lambda s: s.truncated, self.max_share, "truncated")


@dataclass(frozen=True, slots=True)
class FilterChain:
    """A run's filters in their order, behind the least number of usable samples."""

    filters: Sequence[GroupFilter] = (ZeroVariance(),)
    min_usable: int = 1

    def judge(self, group: GroupOutcome) -> Verdict:
        """The first reason to drop a group, or that it is kept."""
        if len(group.usable) < max(1, self.min_usable):
            return Verdict(keep=False, reason=TOO_FEW_USABLE)
        verdicts = (one.judge(group) for one in self.filters)
        return next((verdict for verdict in verdicts if not verdict.keep), KEEP)


def _limit(
    group: GroupOutcome, counts: Callable[[SampleOutcome], bool], max_share: float, reason: str
) -> Verdict:
    share = sum(map(counts, group.usable)) / len(group.usable)
    return Verdict(keep=False, reason=reason) if share > max_share else KEEP
