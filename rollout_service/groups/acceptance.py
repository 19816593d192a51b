"""How many groups are needed: as many as are expected to yield the kept groups asked for, and no more.

Guarantees: no group is requested while those ready and under way are expected to suffice, with the given confidence. A
dropped group is replaced at once, without waiting for others.

A group under way counts with its probability of being kept. That is learned in two steps: the acceptance rate of the
run, and how it changes with a group's progress. A group of eight in which five rollouts have ended with equal rewards
is more likely to be dropped than a group in which none has ended; a group with two different rewards is almost certain
to be kept. All rates are means of Beta posteriors whose older evidence fades, since tasks become easier or harder as a
policy learns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

CONFIDENCE = 0.9
"""The probability with which the groups under way should suffice; a surplus goes into the next batch."""
_HALF_LIFE = 256.0
"""The number of closed groups after which evidence counts half."""
_EPOCH_DISCOUNT = 0.5
"""The weight of evidence from the previous epoch: the policy has learned from the same tasks since."""
_LOWEST_RATE = 0.02
"""The lowest rate assumed: without it, a streak of bad luck could start any multiple of the groups needed."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group has come."""

    ended: int = 0
    """The number of samples that have ended."""
    varied: bool = False
    """Whether any two of their rewards differ."""


@dataclass(slots=True)
class BetaRate:
    """A probability, estimated from a prior and fading evidence."""

    kept: float = 0.0
    dropped: float = 0.0

    def learn(self, *, kept: bool, fade: float) -> None:
        """Add one case, and let earlier ones fade."""
        self.kept = self.kept * fade + kept
        self.dropped = self.dropped * fade + (not kept)

    def mean(self, prior: float, strength: float) -> float:
        """Return the posterior mean, for a prior worth `strength` cases."""
        return (prior * strength + self.kept) / (strength + self.kept + self.dropped)


@dataclass(slots=True)
class AcceptanceRate:
    """The share of a run's groups that pass its filters, also given their progress."""

    prior: float = 0.5
    prior_strength: float = 4.0
    """How many groups the prior is worth."""
    half_life: float = _HALF_LIFE
    closed: int = 0
    _overall: BetaRate = field(default_factory=BetaRate)
    _by_progress: dict[GroupProgress, BetaRate] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The share of the groups starting now that will be kept."""
        return max(_LOWEST_RATE, self._overall.mean(self.prior, self.prior_strength))

    def given(self, progress: GroupProgress) -> float:
        """Return the probability that a group with this progress will be kept."""
        if progress.ended == 0:
            return self.rate
        seen = self._by_progress.get(progress, _NOTHING_SEEN)
        return seen.mean(self.rate, self.prior_strength)

    def learn(self, *, kept: bool, path: Iterable[GroupProgress] = ()) -> None:
        """Learn from a closed group; `path` is the progress it went through."""
        self.closed += 1
        fade = 0.5 ** (1.0 / self.half_life)
        self._overall.learn(kept=kept, fade=fade)
        for progress in path:
            self._by_progress.setdefault(progress, BetaRate()).learn(kept=kept, fade=fade)

    def new_epoch(self) -> None:
        """Discount the evidence, since the tasks start over."""
        for rate in (self._overall, *self._by_progress.values()):
            rate.kept *= _EPOCH_DISCOUNT
            rate.dropped *= _EPOCH_DISCOUNT


_NOTHING_SEEN = BetaRate()


def groups_needed(
    *, need: int, under_way: Mapping[GroupProgress, int], acceptance: AcceptanceRate, confidence: float
) -> int:
    """Return how many groups to start so that, with this confidence, at least `need` of all under way will be kept.

    Let E and V be the mean and variance of the number kept of those under way, and a the acceptance rate. Then m new
    groups add x = m * a on average. The normal approximation requires E + x - need >= z * sqrt(V + x * (1 - a)), whose
    boundary is the larger root of a quadratic in x.
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
