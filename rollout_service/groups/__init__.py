"""Decisions about groups: filters, statistics, acceptance, staleness, fair shares. No I/O, no clock."""

from rollout_service.groups.acceptance import (
    AcceptanceRate,
    AdmissionState,
    GroupProgress,
    admission_capacity,
    groups_needed,
    groups_to_start,
    oldest_allowed_version,
)
from rollout_service.groups.branching import branch_points
from rollout_service.groups.filters import (
    CANCELLED,
    DELETED,
    NOT_FILTERED,
    STALE,
    STRAGGLER,
    SURPLUS,
    FilterChain,
    FilterRegistry,
    GroupFilter,
    GroupOutcome,
    SampleOutcome,
    Verdict,
    require_outcome_filters,
)
from rollout_service.groups.scheduler import Claim, CompletionTimes, FairScheduler
from rollout_service.groups.statistics import (
    group_normalized,
    leave_one_out,
    parallel_figures,
    parts_normalized,
    soft_overlong_penalty,
    work_sums,
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
    "SampleOutcome",
    "Verdict",
    "admission_capacity",
    "branch_points",
    "group_normalized",
    "groups_needed",
    "groups_to_start",
    "leave_one_out",
    "oldest_allowed_version",
    "parallel_figures",
    "parts_normalized",
    "require_outcome_filters",
    "soft_overlong_penalty",
    "work_sums",
]
