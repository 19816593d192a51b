"""Groups worth training on: filters, statistics, demand, staleness, fair shares. Pure logic, without IO or clock."""

from rollout_service.groups.acceptance import AcceptanceRate, Progress, groups_to_begin
from rollout_service.groups.admission import Standing, admissible, admission_capacity, too_old, wanted
from rollout_service.groups.filters import FilterChain, GroupFilter, Verdict
from rollout_service.groups.outcome import (
    CANCELLED,
    STALE,
    STRAGGLER,
    SURPLUS,
    GroupOutcome,
    SampleOutcome,
)
from rollout_service.groups.registry import FilterRegistry
from rollout_service.groups.scheduler import Claim, FairScheduler
from rollout_service.groups.statistics import (
    GroupStatistics,
    group_normalised,
    group_statistics,
    leave_one_out,
    soft_overlong_penalty,
)
from rollout_service.groups.stragglers import CompletionTimes, StragglerRule

__all__ = [
    "CANCELLED",
    "STALE",
    "STRAGGLER",
    "SURPLUS",
    "AcceptanceRate",
    "Claim",
    "CompletionTimes",
    "FairScheduler",
    "FilterChain",
    "FilterRegistry",
    "GroupFilter",
    "GroupOutcome",
    "GroupStatistics",
    "Progress",
    "SampleOutcome",
    "Standing",
    "StragglerRule",
    "Verdict",
    "admissible",
    "admission_capacity",
    "group_normalised",
    "group_statistics",
    "groups_to_begin",
    "leave_one_out",
    "soft_overlong_penalty",
    "too_old",
    "wanted",
]
