"""Critical steps: how many steps follow each other while sub-agents run at the same time.

A step is one turn of a policy. A turn of an agent costs its own steps, and then those of its longest sub-agent (Kimi
K2.5, arXiv 2602.02276, section 3):

- critical = sum over turns t of (main_t + max over the sub-agents of t of their critical steps);
- scheduled = the same, with the sum over the waves of t of their longest sub-agent, since a wave waits for the last;
- total = all steps of all agents.

The steps of a sub-agent that has sub-agents of its own are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of an agent, those of its sub-agents included."""

    critical: int = 0
    scheduled: int = 0
    total: int = 0


@dataclass(slots=True)
class TurnSteps:
    """The steps of one turn of an agent."""

    main: int = 1
    """The agent's own."""
    waves: list[list[Steps]] = field(default_factory=list)
    """Those of its sub-agents, wave by wave."""


def add_up(turns: Iterable[TurnSteps]) -> Steps:
    """Return the steps of an agent from those of its turns."""
    critical = scheduled = total = 0
    for turn in turns:
        branches = [branch for wave in turn.waves for branch in wave]
        critical += turn.main + max((branch.critical for branch in branches), default=0)
        scheduled += turn.main + sum(
            max((branch.scheduled for branch in wave), default=0) for wave in turn.waves
        )
        total += turn.main + sum(branch.total for branch in branches)
    return Steps(critical, scheduled, total)
