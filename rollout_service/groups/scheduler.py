"""Decides which run starts its next group when several could, and when a group stops waiting for its slowest rollouts.

Runs of a higher priority are served first, and runs of equal priority share in proportion to their weights. Every
sixteenth turn goes to the run that has waited for the most turns, whatever its priority, so no run starves. A run gains
no credit from turns it did not use.

Shares follow stride scheduling (Waldspurger and Weihl, 1995): each grant advances a run's pass by 1 / weight, and the
lowest pass is next. Among runs of one priority that always have claims, each stays within one grant of its share, times
the number of runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from api_schemas.runs import Stragglers

STARVATION_TURNS = 16
"""One in this many grants goes to the run that has waited longest."""


@dataclass(frozen=True, slots=True)
class Claim:
    groups: int
    priority: int = 0
    weight: float = 1.0


@dataclass(slots=True)
class _Account:
    position: float
    """The run's pass, as stride scheduling calls it."""
    served: int
    """The turn in which it was last served, or began to claim groups."""


class FairScheduler:
    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._claiming: frozenset[str] = frozenset()
        """Runs with claims in the last call."""
        self._turn = 0
        self._virtual: dict[int, float] = {}
        """The last pass served, by priority."""

    def grant(self, claims: Mapping[str, Claim], places: int) -> dict[str, int]:
        """Return how many groups each run starts: at most `places` together, and no run more than it claims."""
        claiming = {run: claim for run, claim in claims.items() if claim.groups > 0}
        self._enter(claiming)
        granted = dict.fromkeys(claiming, 0)
        open_runs = set(claiming)
        for _ in range(places):
            if not open_runs:
                break
            run = self._next(open_runs, claiming)
            self._charge(run, claiming[run])
            granted[run] += 1
            if granted[run] == claiming[run].groups:
                open_runs.discard(run)
        return granted

    def forget(self, run: str) -> None:
        self._accounts.pop(run, None)
        self._claiming -= {run}

    def _enter(self, claiming: Mapping[str, Claim]) -> None:
        """Let runs that begin to claim join at the current pass, or later if they had more than their share."""
        for run in claiming.keys() - self._claiming:
            at = self._virtual.get(claiming[run].priority, 0.0)
            before = self._accounts.get(run)
            self._accounts[run] = _Account(max(at, before.position) if before else at, self._turn)
        self._claiming = frozenset(claiming)

    def _next(self, runs: Collection[str], claims: Mapping[str, Claim]) -> str:
        self._turn += 1
        if self._turn % STARVATION_TURNS == 0:
            return min(runs, key=lambda run: (self._accounts[run].served, run))
        highest = max(claims[run].priority for run in runs)
        first = [run for run in runs if claims[run].priority == highest]
        return min(first, key=lambda run: (self._accounts[run].position, run))

    def _charge(self, run: str, claim: Claim) -> None:
        account = self._accounts[run]
        account.served = self._turn
        at = self._virtual.get(claim.priority, 0.0)
        self._virtual[claim.priority] = max(at, account.position)
        account.position += 1.0 / claim.weight


_WINDOW = 1_024
_FEWEST = 32
"""A quantile is meaningful from this many completions on."""


class CompletionTimes:
    """The durations, in seconds, of a run's latest rollouts."""

    def __init__(self, window: int = _WINDOW, fewest: int = _FEWEST) -> None:
        self._window = window
        self._fewest = fewest
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        """Add the duration of a rollout that ended by itself."""
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._latest) > self._window:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def add_cut_off(self) -> None:
        """Add a rollout that was cut off.

        It counts as longer than any other, so cutting off does not lower the quantile that decides about the next one.
        """
        self.add(math.inf)

    def quantile(self, share: float) -> float | None:
        """Return the duration that this share of rollouts does not exceed; None while it is unknown."""
        if len(self._sorted) < self._fewest:
            return None
        seconds = self._sorted[math.ceil(share * len(self._sorted)) - 1]
        return None if math.isinf(seconds) else seconds

    def straggler_limit(self, asked: Stragglers) -> float | None:
        """Return the seconds after which a rollout is a straggler; None while that is unknown."""
        seconds = self.quantile(asked.quantile)
        return None if seconds is None else asked.factor * seconds
