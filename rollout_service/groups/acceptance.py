"""How many groups to have under way: as many as are expected to be needed, and no more.

Guarantees: never asks for a group while those ready and under way are expected to suffice, with the confidence asked
for; asks at once when a group is dropped, without waiting for others.

What is under way is worth its probability of being kept. That is learned in two steps: the acceptance rate of the
run, and how it changes with what a group has shown so far. Eight rollouts of which five have ended alike are likelier
to be dropped than eight of which none has; two that ended differently are nearly certain to be kept. All rates are
means of Beta posteriors whose older evidence fades, since a policy that learns changes what it finds hard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

CONFIDENCE = 0.9
"""With what probability the groups under way shall suffice; what turns out surplus goes into the next batch."""
_HALF_LIFE = 256.0
"""Closed groups after which evidence counts half."""
_EPOCH_DISCOUNT = 0.5
"""What evidence is worth when the tasks are gone through again: the policy has learned from them since."""
_LOWEST_RATE = 0.02
"""A rate is not taken for lower than this, so that a run of bad luck does not start fifty times what is needed."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """What a group has shown so far."""

    ended: int = 0
    """Samples that have ended."""
    varied: bool = False
    """Whether two of their rewards differ."""


@dataclass(slots=True)
class BetaRate:
    """A probability, learned from fading evidence over a prior."""

    kept: float = 0.0
    dropped: float = 0.0

    def learn(self, *, kept: bool, fade: float) -> None:
        """Take in one case; earlier ones fade."""
        self.kept = self.kept * fade + kept
        self.dropped = self.dropped * fade + (not kept)

    def mean(self, prior: float, strength: float) -> float:
        """The posterior's mean with a prior of so many cases."""
        return (prior * strength + self.kept) / (strength + self.kept + self.dropped)


@dataclass(slots=True)
class AcceptanceRate:
    """The share of groups that pass a run's filters, and the same for groups under way."""

    prior: float = 0.5
    prior_strength: float = 4.0
    """Groups that the prior counts as."""
    half_life: float = _HALF_LIFE
    closed: int = 0
    _overall: BetaRate = field(default_factory=BetaRate)
    _by_progress: dict[GroupProgress, BetaRate] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The share of groups that begin now and will be kept."""
        return max(_LOWEST_RATE, self._overall.mean(self.prior, self.prior_strength))

    def given(self, progress: GroupProgress) -> float:
        """The probability that a group which has shown this will be kept."""
        if progress.ended == 0:
            return self.rate
        seen = self._by_progress.get(progress, _NOTHING_SEEN)
        return seen.mean(self.rate, self.prior_strength)

    def learn(self, *, kept: bool, path: Iterable[GroupProgress] = ()) -> None:
        """A group was closed, after having shown what is on its path."""
        self.closed += 1
        fade = 0.5 ** (1.0 / self.half_life)
        self._overall.learn(kept=kept, fade=fade)
        for progress in path:
            self._by_progress.setdefault(progress, BetaRate()).learn(kept=kept, fade=fade)

    def new_epoch(self) -> None:
        """The tasks begin again: what was learned of them counts less."""
        for rate in (self._overall, *self._by_progress.values()):
            rate.kept *= _EPOCH_DISCOUNT
            rate.dropped *= _EPOCH_DISCOUNT


_NOTHING_SEEN = BetaRate()


def groups_needed(
    *, need: int, under_way: Mapping[GroupProgress, int], acceptance: AcceptanceRate, confidence: float
) -> int:
    """How many groups must begin so that, with this confidence, at least `need` of all under way will be kept.

    With E and V the mean and variance of what will be kept of those under way, and rate a, x = m * a is the mean of
    what m new ones add. The normal approximation asks for E + x - need >= z * sqrt(V + x * (1 - a)), whose boundary is
    the larger root of a quadratic in x.
    """
    mean = variance = 0.0
    for progress, count in under_way.items():
        chance = acceptance.given(progress)
        mean += count * chance
        variance += count * chance * (1 - chance)
    z = NormalDist().inv_cdf(confidence)
    missing = need - mean
    if need <= 0 or missing + z * math.sqrt(variance) <= 0:
        return 0
    rate = acceptance.rate
    half = missing + z * z * (1 - rate) / 2
    spread = half * half - missing * missing + z * z * variance
    added = half + math.copysign(math.sqrt(max(0.0, spread)), z)
    return max(0, math.ceil(added / rate - 1e-9))
