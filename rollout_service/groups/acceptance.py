"""How many groups are needed: as many as are expected to yield the kept groups asked for, and no more.

No group is requested while those ready and under way are expected to suffice, with the given confidence. A dropped
group is replaced at once, without waiting for others.

A group under way counts with its probability of being kept. That is learned in two steps: the acceptance rate of the
run, and how it changes with a group's progress. A group of eight in which five rollouts have ended with equal rewards
is more likely to be dropped than a group in which none has ended; a group with two different rewards is almost certain
to be kept. All rates are means of Beta posteriors whose older evidence fades, since tasks become easier or harder as a
policy learns.

The functions remember nothing: equal states give equal answers, so a crash changes none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Self

CONFIDENCE = 0.9
"""The probability with which the groups under way should suffice; a surplus goes into the next batch."""
_FADE = 0.5 ** (1 / 256)
"""Weighs all evidence at each closed group: after 256 it counts half."""
_PRIOR_STRENGTH = 4.0
"""How many groups the prior is worth."""
_EPOCH_DISCOUNT = 0.5
"""Weighs evidence from the previous epoch: the policy has learned from the same tasks since."""
_LOWEST_RATE = 0.02
"""A streak of bad luck could otherwise start any multiple of the groups needed."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    ended: int = 0
    varied: bool = False
    """Whether any two of the samples' rewards differ."""


@dataclass(slots=True)
class BetaRate:
    kept: float = 0.0
    dropped: float = 0.0

    def learn(self, *, kept: bool) -> None:
        self.kept = self.kept * _FADE + kept
        self.dropped = self.dropped * _FADE + (not kept)

    def mean(self, prior: float) -> float:
        """Return the posterior mean."""
        return (prior * _PRIOR_STRENGTH + self.kept) / (_PRIOR_STRENGTH + self.kept + self.dropped)


@dataclass(slots=True)
class AcceptanceRate:
    """The share of a run's groups that pass its filters, also given their progress."""

    prior: float = 0.5
    _overall: BetaRate = field(default_factory=BetaRate)
    _by_progress: dict[GroupProgress, BetaRate] = field(default_factory=dict)

    @classmethod
    def from_counts(cls, kept: int, dropped: int) -> Self:
        """Return the rate of a run that has closed so many groups, as if these had been evenly mixed."""
        weight = (1 - _FADE ** (kept + dropped)) / (1 - _FADE) / max(1, kept + dropped)
        return cls(_overall=BetaRate(kept * weight, dropped * weight))

    @property
    def rate(self) -> float:
        return max(_LOWEST_RATE, self._overall.mean(self.prior))

    def given(self, progress: GroupProgress) -> float:
        if progress.ended == 0:
            return self.rate
        seen = self._by_progress.get(progress, _NOTHING_SEEN)
        return seen.mean(self.rate)

    def learn(self, *, kept: bool, path: Iterable[GroupProgress] = ()) -> None:
        """Learn from a closed group; `path` is the progress that it went through."""
        self._overall.learn(kept=kept)
        for progress in path:
            self._by_progress.setdefault(progress, BetaRate()).learn(kept=kept)

    def new_epoch(self) -> None:
        """Discount the evidence, since the tasks start over."""
        for rate in (self._overall, *self._by_progress.values()):
            rate.kept *= _EPOCH_DISCOUNT
            rate.dropped *= _EPOCH_DISCOUNT


_NOTHING_SEEN = BetaRate()


def groups_needed(
    *, need: int, under_way: Mapping[GroupProgress, int], acceptance: AcceptanceRate, confidence: float
) -> int:
    """Return how many groups to start so that at least `need` of all under way will be kept.

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


@dataclass(frozen=True, slots=True)
class AdmissionState:
    batch_size: int
    max_concurrent: int
    max_staleness: int | None
    """How many versions a batch's oldest token may lag behind the trainer; None sets no limit."""
    prefetch_batches: int
    """Batches beyond the one that is waited for."""
    version: int
    """How many versions the trainer has advanced since the run began."""
    running: int = 0
    ready: int = 0
    """Kept, and not yet in a batch."""
    batched: int = 0
    """In a batch that is not acknowledged yet."""
    acknowledged: int = 0

    @property
    def accepted(self) -> int:
        """Groups kept since the run began.

        Acknowledged groups count as at least one batch per version. Otherwise a trainer that starts at a later version,
        or skips versions, would be granted the groups of all of them at once.
        """
        return max(self.acknowledged, self.version * self.batch_size) + self.ready + self.batched


def admission_capacity(run: AdmissionState) -> int:
    """Return how many groups may start by AReaL's formula; without `max_staleness`, only concurrency limits them.

    capacity = min(max(1, max_concurrent) - running, (max_staleness + version + 1) * B - (accepted + running)), for
    batches of B groups (arXiv 2505.24298, section 5.1, as in its code). It may be negative, for example after a limit
    was lowered. A group that ends without being kept, or is dropped later, frees its place. After a restart at version
    v, at most (max_staleness + 1) * B groups are granted before the trainer moves on.
    """
    free = max(1, run.max_concurrent) - run.running
    if run.max_staleness is None:
        return free
    allowed = (run.max_staleness + run.version + 1) * run.batch_size
    return min(free, allowed - (run.accepted + run.running))


def groups_to_start(run: AdmissionState, under_way: Mapping[GroupProgress, int], acceptance: AcceptanceRate) -> int:
    """Return how many groups to start now: those expected to be needed, within the capacity; never negative."""
    needed = groups_needed(
        need=(1 + run.prefetch_batches) * run.batch_size - run.ready,
        under_way=under_way,
        acceptance=acceptance,
        confidence=CONFIDENCE,
    )
    return max(0, min(needed, admission_capacity(run)))


def oldest_allowed_version(*, version: int, max_staleness: int | None) -> int | None:
    """Return None if there is no limit."""
    return None if max_staleness is None else version - max_staleness
