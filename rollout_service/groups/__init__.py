"""Decisions about groups: filters, statistics, acceptance, staleness, fair shares. No I/O, no clock.

Here are the names for authors of filters.
"""

from rollout_service.groups.filters import GroupFilter, GroupOutcome, RewardFilter, SampleOutcome, Verdict

__all__ = ["GroupFilter", "GroupOutcome", "RewardFilter", "SampleOutcome", "Verdict"]
