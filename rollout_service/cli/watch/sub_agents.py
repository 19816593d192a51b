"""Renders how the rollouts of a run use sub-agents: each figure next to the failure that it shows."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from api_schemas.rollouts.figures import ParallelFigures, RunParallel
from rollout_service.cli.console import table

SIGNS: dict[str, tuple[str, ...]] = {
    "serial": (
        "assign_rate",
        "delegate_ratio",
        "assigns_per_turn",
        "width_mean",
        "width_max",
        "critical/total",
    ),
    "spurious": ("assigns_per_rollout", "duplicate_share", "over_cap_share", "abandoned_share"),
    "one big branch": ("balance", "straggler_seconds", "eta"),
    "useless sub-agents": ("finish_rate", "invalid", "refused_share"),
    "waste": ("subagent_tokens", "tokens_per_solved", "result_chars_per_assign"),
    "latency": (
        "critical_steps",
        "scheduled_steps",
        "total_steps",
        "speedup",
        "critical_seconds",
        "queued_seconds",
    ),
    "outcome": ("rollouts", "perf"),
}
"""The figures by what they show."""


def render_parallel(parallel: RunParallel) -> Table:
    """Return a table of the figures over the run so far, and over the last rollouts if they are known."""
    columns = ["so far"] if parallel.recent is None else ["so far", f"last {parallel.recent.rollouts}"]
    rows = table("shows", "figure", *columns)
    for sign, names in SIGNS.items():
        for name in names:
            both = (parallel.total, parallel.recent)
            rows.add_row(sign, name, *(_shown(one, name) for one in both if one is not None))
    return rows


def _shown(figures: ParallelFigures, name: str) -> str:
    if name == "critical/total":
        return _number(None if figures.speedup is None else 1 / figures.speedup)
    if name == "invalid":
        return _reasons(figures)
    return _number(getattr(figures, name))


def _reasons(figures: ParallelFigures) -> str:
    if figures.invalid is None:
        return "-"
    return ", ".join(_by_share(figures)) or "none"


def _by_share(figures: ParallelFigures) -> Iterator[str]:
    shares = figures.invalid or {}
    for reason in sorted(shares, key=lambda one: (-shares[one], one)):
        yield f"{reason} {shares[reason]:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:,.2f}"
