"""Figures about how the rollouts of a run divide their work among sub-agents.

Each of `ParallelFigures` shows a failure that such runs are known for; docs/how-to/watch-sub-agents.md says which.

Guarantee: a figure without any data is null, never 0.
"""

from __future__ import annotations

from api_schemas.base import Integer, Real, WireModel
from api_schemas.rollouts.trees import InvalidBecause


class ParallelFigures(WireModel):
    """Figures over rollouts that were scored. Assigned tasks are those that ran; see `Work`."""

    rollouts: Integer
    """The number of rollouts."""
    perf: Real | None = None
    """The mean of their `reward_parts.perf`, or of their rewards if they have no such part."""
    solved: Integer = 0
    """Those for which this is at least 1."""

    assign_rate: Real | None = None
    """The share of rollouts that assigned a task."""
    delegate_ratio: Real | None = None
    """Assigned tasks over these and the root's calls of other tools."""
    assigns_per_rollout: Real | None = None
    assigns_per_turn: Real | None = None
    """Assigned tasks over the root's turns."""
    width_mean: Real | None = None
    """The mean of `Work.width_mean` over the rollouts that assigned a task."""
    width_max: Real | None = None
    """The mean of `Work.width_max` over these."""

    critical_steps: Real | None = None
    """The mean of the rollouts, as the next two are."""
    scheduled_steps: Real | None = None
    total_steps: Real | None = None
    speedup: Real | None = None
    """All steps over all critical steps; 1 if nothing ran at the same time."""
    balance: Real | None = None
    """The mean of `Work.balance` over the rollouts that have one."""

    finish_rate: Real | None = None
    """The share of assigned tasks whose result is valid."""
    invalid: dict[InvalidBecause, Real] | None = None
    """The share of assigned tasks whose result is not valid, by reason; null also if a record of a sub-agent is
    missing."""
    duplicate_share: Real | None = None
    """The share of assigned tasks that were assigned to the same sub-agent before."""
    over_cap_share: Real | None = None
    """The share of all calls of `assign_task` that were over a limit."""
    refused_share: Real | None = None
    """The share of them that were refused."""
    abandoned_share: Real | None = None
    """The share of them that came with the final answer, and so did not run."""

    subagent_tokens: Real | None = None
    """The tokens that sub-agents sampled, per rollout."""
    tokens_per_solved: Real | None = None
    """The same over the number of solved rollouts; null if none was solved."""
    result_chars_per_assign: Real | None = None
    """The length of the results that roots read, over the number of assigned tasks."""

    critical_seconds: Real | None = None
    """The mean of the rollouts, as the next two are."""
    queued_seconds: Real | None = None
    straggler_seconds: Real | None = None
    eta: Real | None = None
    """The mean number of sub-agents at work in the critical time (AsyncThink, arXiv 2510.26658)."""


class StepsSpread(WireModel):
    """The critical steps of the usable samples of a group."""

    min: Integer
    mean: Real
    max: Integer


class RunParallel(WireModel):
    """How the rollouts of a run divide their work among sub-agents."""

    total: ParallelFigures
    """Over the scored rollouts of all closed groups, those that were dropped included."""
    recent: ParallelFigures | None = None
    """Over the last 256 of them that ended since the service began to work on the run; null if there was none, once the
    run has no more to do, and on a node that does not work on runs."""
