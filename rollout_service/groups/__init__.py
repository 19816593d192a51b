"""Decisions about groups: filters, statistics, acceptance, staleness, fair shares. No I/O, no clock.

Here are the names for authors of filters, and the figures of sub-agents.
"""

from rollout_service.groups.filters import GroupFilter, GroupOutcome, RewardFilter, SampleOutcome, Verdict
from rollout_service.groups.statistics import parallel_figures, work_sums

__all__ = [
    "GroupFilter",
    "GroupOutcome",
    "RewardFilter",
    "SampleOutcome",
    "Verdict",
    "parallel_figures",
    "work_sums",
]
