"""The outcome of a group: the facts for filters, statistics and batches.

Guarantees: a sample without a reward is masked and says why, so a failure never counts as a score. These values are
independent of the wire format and the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from api_schemas.runs.auxiliary import RewardPart

STRAGGLER = "straggler"
"""The sample was cut off because it took far longer than others."""
STALE = "stale"
"""The sample, or too many samples of the group, have a token older than the run allows."""
CANCELLED = "cancelled"
"""The sample was cancelled, by a person or because it was not needed."""
SURPLUS = "surplus"
"""The group was not needed, and its run does not carry groups over."""
DELETED = "deleted"
"""The sample was erased on a person's demand; a group of which too little is left is dropped."""
NOT_FILTERED = frozenset({STALE, SURPLUS, CANCELLED, DELETED})
"""The reasons for dropping a group that say nothing about its task."""
NOT_A_NUMBER = "reward_not_finite"
"""The reward is infinite or not a number."""


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """One rollout of a group, after its last attempt."""

    sample: int
    """The number of the sample in its group, from 0."""
    reward: float | None
    """The environment's reward before any penalty; None if the sample is masked."""
    masked: str | None = None
    """Why the sample does not count: the code of a failure, or one of this module's reasons; None if it counts."""
    sampled_tokens: int = 0
    truncated: bool = False
    """Whether a limit of tokens, turns or time ended the sample."""
    tool_calls: int = 0
    malformed_calls: int = 0
    oldest_version: int | None = None
    """The lowest version that sampled one of its tokens; None if nothing was sampled."""
    newest_version: int | None = None
    parts: Mapping[RewardPart, float] = field(default_factory=dict)
    """The parts of the reward and their total; empty if the sample does not count."""

    def __post_init__(self) -> None:
        if self.masked is None and self.reward is None:
            raise ValueError("a sample without a reward needs a reason in `masked`")
        if self.masked is None and not math.isfinite(self.reward or 0.0):
            object.__setattr__(self, "masked", NOT_A_NUMBER)
        if self.masked is not None:
            object.__setattr__(self, "reward", None)

    @property
    def usable(self) -> bool:
        """Whether the sample counts."""
        return self.masked is None


@dataclass(frozen=True)
class GroupOutcome:
    """All rollouts of one task, each after its last attempt."""

    number: int
    """The task's number in its run."""
    samples: tuple[SampleOutcome, ...]

    @cached_property
    def usable(self) -> tuple[SampleOutcome, ...]:
        """The samples that are not masked."""
        return tuple(sample for sample in self.samples if sample.usable)

    def without_older_than(self, bound: int | None) -> GroupOutcome:
        """Return the group with every usable sample masked that has a token older than `bound`; None masks none."""
        if bound is None or self.oldest_version is None or self.oldest_version >= bound:
            return self
        samples = (
            replace(sample, masked=STALE)
            if sample.usable and sample.oldest_version is not None and sample.oldest_version < bound
            else sample
            for sample in self.samples
        )
        return replace(self, samples=tuple(samples))

    @cached_property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the usable samples, in order."""
        return tuple(sample.reward for sample in self.usable if sample.reward is not None)

    def values(self, part: RewardPart) -> tuple[float, ...]:
        """Return this part of the rewards of the usable samples, in order."""
        if part is RewardPart.PERF:
            return self.rewards
        return tuple(sample.parts[part] for sample in self.usable)

    @cached_property
    def oldest_version(self) -> int | None:
        """The lowest version of a token in a usable sample."""
        versions = (sample.oldest_version for sample in self.usable)
        return min((version for version in versions if version is not None), default=None)

    @cached_property
    def newest_version(self) -> int | None:
        """The highest version of a token in a usable sample."""
        versions = (sample.newest_version for sample in self.usable)
        return max((version for version in versions if version is not None), default=None)
