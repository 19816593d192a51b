"""Which run begins its next group when several want to.

Guarantees: runs of a higher priority are served first, and those of one priority share in proportion to their weights;
every sixteenth turn goes to the run that has waited for the most turns, whatever its priority, so that a run which
wants to goes on. Time that a run did not use gives it no claim later.

Shares are kept by stride scheduling (Waldspurger and Weihl, 1995): each grant moves a run's pass on by 1 / weight, and
the lowest pass is next. Among runs of one priority that want at all times, none is further than one grant from its
share, times the number of runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

STARVATION_TURNS = 16
"""Every so many grants one goes to the run that has waited longest."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a run wants."""

    groups: int
    """How many it would begin now."""
    priority: int = 0
    weight: float = 1.0


@dataclass(slots=True)
class _Account:
    """What a run has had."""

    position: float
    """Its pass."""
    served: int
    """The turn in which it was served last, or began to want."""


class FairScheduler:
    """Shares a number of places among runs."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._wanted: frozenset[str] = frozenset()
        """Who wanted in the last call."""
        self._turn = 0
        self._virtual: dict[int, float] = {}
        """The pass that was served last, by priority."""

    def grant(self, claims: Mapping[str, Claim], places: int) -> dict[str, int]:
        """Who begins how many groups; together at most `places`, and no run more than it claims."""
        wanting = {run: claim for run, claim in claims.items() if claim.groups > 0}
        self._enter(wanting)
        granted = dict.fromkeys(wanting, 0)
        open_runs = set(wanting)
        for _ in range(places):
            if not open_runs:
                break
            run = self._next(open_runs, wanting)
            self._charge(run, wanting[run])
            granted[run] += 1
            if granted[run] == wanting[run].groups:
                open_runs.discard(run)
        return granted

    def forget(self, run: str) -> None:
        """A run is over."""
        self._accounts.pop(run, None)
        self._wanted -= {run}

    def _enter(self, wanting: Mapping[str, Claim]) -> None:
        """A run that begins to want starts where the order stands, or later if it has had more than its share."""
        for run in wanting.keys() - self._wanted:
            at = self._virtual.get(wanting[run].priority, 0.0)
            before = self._accounts.get(run)
            self._accounts[run] = _Account(max(at, before.position) if before else at, self._turn)
        self._wanted = frozenset(wanting)

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
