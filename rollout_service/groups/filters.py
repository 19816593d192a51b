"""The outcome of a group, and the registered filters that decide whether it is worth training on, with a reason.

A filter sees only usable samples and no clock, so judging a group again gives the same answer. The first filter that
drops a group determines the reason; reasons are short words that can be counted. A sample without a reward is masked
and says why, so a failure never counts as a score.

Plug-ins subclass `GroupFilter`, or `RewardFilter` if they look at rewards, and register the class under the entry point
group `rollout_service.filters`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from api_schemas.base import MAX_FLOAT32
from api_schemas.errors import FieldError
from api_schemas.runs.auxiliary import RewardPart
from rollout_service.base.errors import ConfigurationError, InvalidFieldError, did_you_mean

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

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> Self:
        if self.low > self.high:
            raise ValueError("low may not exceed high")
        return self

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
        """The parts that the filters look at, each once, in their order."""
        return list(dict.fromkeys(one.part for one in self.filters if isinstance(one, RewardFilter)))

    def judge(self, group: GroupOutcome) -> Verdict:
        if len(group.usable) < max(1, self.min_usable):
            return Verdict(keep=False, reason=TOO_FEW_USABLE)
        verdicts = (one.judge(group) for one in self.filters)
        return next((verdict for verdict in verdicts if not verdict.keep), KEEP)


def _limit(group: GroupOutcome, counts: Callable[[SampleOutcome], bool], max_share: float, reason: str) -> Verdict:
    share = sum(map(counts, group.usable)) / len(group.usable)
    return Verdict(keep=False, reason=reason) if share > max_share else KEEP


STRAGGLER = "straggler"
STALE = "stale"
"""The sample, or too many samples of the group, have a token older than the run allows."""
CANCELLED = "cancelled"
"""The sample was cancelled, by a person or because it was not needed."""
SURPLUS = "surplus"
"""The group was not needed, and its run does not carry groups over."""
DELETED = "deleted"
"""The sample was erased on a person's demand; a group of which too little is left is dropped."""
NOT_FILTERED = frozenset({STALE, SURPLUS, CANCELLED, DELETED})
"""Reasons that say nothing about a group's task."""
NOT_A_NUMBER = "reward_not_finite"


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """One rollout of a group, after its last attempt."""

    sample: int
    """The number of the sample in its group, from 0."""
    reward: float | None
    """The environment's reward before any penalty; None if the sample is masked."""
    masked: str | None = None
    """Why the sample does not count: the code of a failure, or one of this module's reasons."""
    sampled_tokens: int = 0
    truncated: bool = False
    """Whether a limit of tokens, turns or time ended the sample."""
    tool_calls: int = 0
    malformed_calls: int = 0
    oldest_version: int | None = None
    """The lowest version that sampled one of its tokens; None if nothing was sampled."""
    newest_version: int | None = None
    parts: Mapping[RewardPart, float] = field(default_factory=dict)
    """The parts of the reward with their total; empty if the sample does not count."""

    def __post_init__(self) -> None:
        if self.masked is None and self.reward is None:
            raise ValueError("a sample without a reward needs a reason in `masked`")
        if self.masked is None and not abs(self.reward or 0.0) <= MAX_FLOAT32:
            object.__setattr__(self, "masked", NOT_A_NUMBER)
        if self.masked is not None:
            object.__setattr__(self, "reward", None)

    @property
    def usable(self) -> bool:
        return self.masked is None


@dataclass(frozen=True)
class GroupOutcome:
    """All rollouts of one task, each after its last attempt."""

    number: int
    """The task's number in its run."""
    samples: tuple[SampleOutcome, ...]

    @cached_property
    def usable(self) -> tuple[SampleOutcome, ...]:
        return tuple(sample for sample in self.samples if sample.usable)

    def without_older_than(self, bound: int | None) -> GroupOutcome:
        """Mask every usable sample that has a token older than `bound`; None masks none."""
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
        """The rewards of usable samples, in order."""
        return tuple(sample.reward for sample in self.usable if sample.reward is not None)

    def values(self, part: RewardPart) -> tuple[float, ...]:
        """Return a part of the usable samples' rewards, in order."""
        if part is RewardPart.PERF:
            return self.rewards
        return tuple(sample.parts[part] for sample in self.usable)

    @cached_property
    def oldest_version(self) -> int | None:
        versions = (sample.oldest_version for sample in self.usable)
        return min((version for version in versions if version is not None), default=None)

    @cached_property
    def newest_version(self) -> int | None:
        versions = (sample.newest_version for sample in self.usable)
        return max((version for version in versions if version is not None), default=None)


GROUP = "rollout_service.filters"


class FilterRegistry:
    def __init__(self) -> None:
        self._kinds: dict[str, type[GroupFilter]] = {
            "zero_variance": ZeroVariance,
            "all_failed": AllFailed,
            "accuracy_band": AccuracyBand,
            "too_long": TooLong,
            "malformed_calls": MalformedCalls,
            "truncated": Truncated,
        }
        self.problems: dict[str, ConfigurationError] = {}
        """The errors of plug-ins that could not be loaded, by name; they hide no other filter."""

    @classmethod
    def load(cls, *, plugins: Iterable[EntryPoint] | None = None) -> Self:
        """Register the built-in filters and all plug-ins, which are imported: call it in a thread."""
        registry = cls()
        for plugin in entry_points(group=GROUP) if plugins is None else plugins:
            try:
                registry.add(plugin.name, _from_plugin(plugin))
            except ConfigurationError as error:
                registry.problems[plugin.name] = error
        return registry

    def add(self, name: str, kind: type[GroupFilter]) -> None:
        """
        Raises:
            ConfigurationError: The name is taken.
        """
        if name in self._kinds:
            raise ConfigurationError(
                f"the filter {name!r} is already registered", hint="Choose another name for the plug-in."
            )
        self._kinds[name] = kind

    @property
    def names(self) -> list[str]:
        return sorted(self._kinds)

    def make(
        self, name: str, options: Mapping[str, JsonValue] | None = None, *, field: str = "body.filters"
    ) -> GroupFilter:
        """
        Raises:
            InvalidFieldError: There is no such filter, or an option is invalid; the path is `field`.
            ConfigurationError: The plug-in of this name could not be loaded.
        """
        if name in self.problems and name not in self._kinds:
            raise self.problems[name]
        if name not in self._kinds:
            message = f"there is no filter {name!r}{did_you_mean(name, self._kinds)}"
            raise InvalidFieldError.at(
                f"{field}.name",
                message,
                hint=f"Known filters: {', '.join(self.names)}.",
            )
        try:
            return self._kinds[name].model_validate(dict(options or {}))
        except ValidationError as error:
            fields = [
                FieldError(
                    path=".".join([field, "options", *map(str, one["loc"])]),
                    message=one["msg"].removeprefix("Value error, "),
                )
                for one in error.errors()
            ]
            hint = f"Options of {name!r}: {', '.join(self._kinds[name].model_fields) or 'none'}."
            raise InvalidFieldError(fields, hint=hint) from error


def require_outcome_filters(filters: Sequence[GroupFilter]) -> None:
    """Refuse filters on rewards for handing on work, for a run that has none.

    Raises:
        InvalidFieldError: A filter of `body.filters` looks at such a part.
    """
    problems = [
        FieldError(
            path=f"body.filters.{index}.options.part",
            message=f"the run has no auxiliary reward, so no {one.part}",
        )
        for index, one in enumerate(filters)
        if isinstance(one, RewardFilter) and one.part in (RewardPart.PARALLEL, RewardPart.FINISH)
    ]
    if problems:
        raise InvalidFieldError(problems, hint="Add `auxiliary` to the run, or leave `part` out.")


def _from_plugin(plugin: EntryPoint) -> type[GroupFilter]:
    where = f"the plug-in {plugin.name!r} ({plugin.value})"
    try:
        kind = plugin.load()
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, GroupFilter)):
        raise ConfigurationError(
            f"{where} is not a GroupFilter",
            hint="Register a subclass of rollout_service.groups.GroupFilter; its fields are its options.",
        )
    return kind
