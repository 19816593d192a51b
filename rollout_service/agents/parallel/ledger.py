"""The costs of one agent: the steps of its turns, and the time of its waves of sub-agents.

A wave that was cut short is included, with the costs of its sub-agents until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BranchTimes:
    """When a sub-agent waited and worked, on `time.perf_counter`."""

    queued: float = 0.0
    """Seconds."""
    began: float | None = None
    """Time of its first slot."""
    ended: float | None = None

    @property
    def worked(self) -> float:
        """Seconds from its slot to its end, or until now."""
        if self.began is None:
            return 0.0
        return (self.ended if self.ended is not None else time.perf_counter()) - self.began


@dataclass(slots=True)
class Wave:
    """Sub-agents of one turn that ran at the same time."""

    turn: int
    distinct: int = 0
    """Tasks that have begun and had not been assigned before."""
    seconds: float = 0.0
    branches: list[BranchTimes] = field(default_factory=list)

    @property
    def longest(self) -> float:
        return max((branch.worked for branch in self.branches), default=0.0)


class Ledger:
    def __init__(self) -> None:
        self.waves: list[Wave] = []
        self.created = 0
        """Different sub-agents."""
        self.direct_calls = 0
        """Calls of other tools."""
        self.result_chars = 0
        """All results that the agent read."""
        self._turns: dict[int, TurnSteps] = {}

    def turn(self, number: int, main: int) -> TurnSteps:
        """Begin a turn whose calls cost `main` steps. A turn that is never begun has no calls, and costs one."""
        self._turns[number] = TurnSteps(main)
        return self._turns[number]

    def main_steps(self, turns: int) -> list[int]:
        return [turn.main for turn in self._all(turns)]

    def steps(self, turns: int) -> Steps:
        return add_up(self._all(turns))

    def balances(self) -> list[float]:
        """Return mean / largest of the steps, for each wave of several sub-agents."""
        waves = [wave for turn in self._turns.values() for wave in turn.waves if len(wave) > 1]
        totals = [[branch.critical for branch in wave] for wave in waves]
        return [sum(steps) / len(steps) / max(steps) for steps in totals if max(steps)]

    def widths(self) -> list[int]:
        """Count the different tasks of each turn that assigned any."""
        by_turn: dict[int, int] = {}
        for wave in self.waves:
            by_turn[wave.turn] = by_turn.get(wave.turn, 0) + wave.distinct
        return list(by_turn.values())

    def longest_of_waves(self) -> float:
        """Sum the seconds of each wave's longest sub-agent."""
        return sum(wave.longest for wave in self.waves)

    def _all(self, turns: int) -> Iterator[TurnSteps]:
        return (self._turns.get(number, TurnSteps()) for number in range(turns))


def alone_seconds(branches: Sequence[BranchTimes]) -> float:
    """Return the seconds in which exactly one of several sub-agents was at work."""
    changes = sorted(
        change
        for branch in branches
        if branch.began is not None and branch.ended is not None
        for change in ((branch.began, 1), (branch.ended, -1))
    )
    if len(branches) < 2:
        return 0.0
    alone, working, since = 0.0, 0, 0.0
    for moment, change in changes:
        if working == 1:
            alone += moment - since
        working, since = working + change, moment
    return alone


@dataclass(frozen=True, slots=True)
class Steps:
    """The critical steps of an agent: those that follow each other while sub-agents run at the same time.

    A step is one turn of a policy. A turn of an agent costs its own steps, and then those of its longest sub-agent
    (Kimi K2.5, arXiv 2602.02276, section 3). The steps of a sub-agent that has sub-agents of its own are computed in
    the same way.

    - `critical`: the sum over turns t of (main_t + max over the sub-agents of t of their critical steps)
    - `scheduled`: the same, with the sum over the waves of t of their longest sub-agent, as a wave waits for the last
    - `total`: all steps of all agents
    """

    critical: int = 0
    scheduled: int = 0
    total: int = 0


@dataclass(slots=True)
class TurnSteps:
    main: int = 1
    waves: list[list[Steps]] = field(default_factory=list)
    """Those of its sub-agents, wave by wave."""


def add_up(turns: Iterable[TurnSteps]) -> Steps:
    critical = scheduled = total = 0
    for turn in turns:
        branches = [branch for wave in turn.waves for branch in wave]
        critical += turn.main + max((branch.critical for branch in branches), default=0)
        scheduled += turn.main + sum(max((branch.scheduled for branch in wave), default=0) for wave in turn.waves)
        total += turn.main + sum(branch.total for branch in branches)
    return Steps(critical, scheduled, total)
