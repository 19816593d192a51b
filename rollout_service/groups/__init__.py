"""Decisions about groups: filters, statistics, acceptance, staleness, fair shares. No I/O, no clock."""

from rollout_service.groups.acceptance import AcceptanceRate, GroupProgress, groups_needed
from rollout_service.groups.admission import (
    AdmissionState,
    admission_capacity,
    groups_to_start,
    is_too_old,
    oldest_allowed_version,
)
from rollout_service.groups.filters import FilterChain, GroupFilter, RewardFilter, Verdict
from rollout_service.groups.outcome import (
    CANCELLED,
    DELETED,
    NOT_FILTERED,
    STALE,
    STRAGGLER,
    SURPLUS,
    GroupOutcome,
    SampleOutcome,
)
from rollout_service.groups.parallel_figures import parallel_figures, work_sums
from rollout_service.groups.registry import FilterRegistry, require_outcome_filters
from rollout_service.groups.scheduler import Claim, CompletionTimes, FairScheduler, StragglerRule
from rollout_service.groups.statistics import (
    GroupStatistics,
    group_normalized,
    group_statistics,
    leave_one_out,
    parts_normalized,
    soft_overlong_penalty,
)

__all__ = [
    "CANCELLED",
    "DELETED",
    "NOT_FILTERED",
    "STALE",
    "STRAGGLER",
    "SURPLUS",
    "AcceptanceRate",
    "AdmissionState",
    "Claim",
    "CompletionTimes",
    "FairScheduler",
    "FilterChain",
    "FilterRegistry",
    "GroupFilter",
    "GroupOutcome",
    "GroupProgress",
    "GroupStatistics",
    "RewardFilter",
    "SampleOutcome",
    "StragglerRule",
    "Verdict",
    "admission_capacity",
    "group_normalized",
    "group_statistics",
    "groups_needed",
    "groups_to_start",
    "is_too_old",
    "leave_one_out",
    "oldest_allowed_version",
    "parallel_figures",
    "parts_normalized",
    "require_outcome_filters",
    "soft_overlong_penalty",
    "work_sums",
]
