"""Metrics of how runs in progress use sub-agents, if they may; the series go when the run has no more to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.trees import Work
from rollout_service.groups.statistics import work_sums
from rollout_service.observability.telemetry.families import gauge

STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = (0.1, 1, 5, 15, 60, 300, 1_200)
UNEXECUTED = ("over_cap", "refused", "abandoned")
TOTALS = ("created", "turns", "direct_calls", "subagent_tokens", "result_chars")


def slot_metrics(held: int, waiting: int, total: int) -> Iterator[Metric]:
    counts = {"active": held, "waiting": waiting, "limit": total}
    yield gauge("rollout_subagents", "Sub-agents by state, and their limit", ["state"], counts)


class ParallelMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._rollouts = counter(
            "rollout_parallel_rollouts_total",
            "Scored rollouts whose agent may have sub-agents, by whether it assigned tasks and was solved",
            ["run", "assigned", "solved"],
        )
        self._assigns = counter(
            "rollout_parallel_assigns_total",
            "Calls of assign_task, by what became of them: valid, why the result is not, or why it did not run",
            ["run", "outcome"],
        )
        self._duplicates = counter(
            "rollout_parallel_duplicates_total",
            "Assigned tasks that were assigned to the same sub-agent before",
            ["run"],
        )
        self._amounts = counter(
            "rollout_parallel_amounts_total",
            "What rollouts did, by kind: created sub-agents, turns, direct_calls, subagent_tokens, result_chars",
            ["run", "kind"],
        )
        self._steps = histogram(
            "rollout_parallel_steps",
            "Steps of a rollout, by kind: critical, scheduled, total",
            ["run", "kind"],
            buckets=STEPS,
        )
        self._width = histogram(
            "rollout_parallel_width",
            "The most different tasks that a rollout assigned in one turn, if it assigned any",
            ["run"],
            buckets=WIDTHS,
        )
        self._balance = histogram(
            "rollout_parallel_balance",
            "Mean over most steps of the sub-agents at work at the same time, by rollout",
            ["run"],
            buckets=SHARES,
        )
        self._seconds = histogram(
            "rollout_parallel_seconds",
            "Time of a rollout, by kind: critical, queued, straggler, and active, the sum over sub-agents",
            ["run", "kind"],
            buckets=SECONDS,
        )

    def observe(self, run: str, rollouts: Iterable[Rollout]) -> None:
        """Record the work of rollouts that were scored and may have sub-agents."""
        for rollout in rollouts:
            if rollout.work is not None and rollout.reward is not None:
                self._observe(run, rollout, rollout.work)

    def clear(self, run: str) -> None:
        counters = (self._rollouts, self._assigns, self._duplicates, self._amounts)
        for metric in (*counters, self._steps, self._width, self._balance, self._seconds):
            metric.remove_by_labels({"run": run})

    def _observe(self, run: str, rollout: Rollout, work: Work) -> None:
        sums = work_sums([rollout])
        self._rollouts.labels(run, _flag(sums["assigning"]), _flag(sums["solved"])).inc()
        self._count_assigns(run, rollout, work)
        self._duplicates.labels(run).inc(sums["duplicate"])
        for kind in TOTALS:
            self._amounts.labels(run, kind).inc(sums[kind])
        for kind in ("critical", "scheduled", "total"):
            self._steps.labels(run, kind).observe(sums[f"{kind}_steps"])
        if work.assigns.executed:
            self._width.labels(run).observe(work.width_max)
        if work.balance is not None:
            self._balance.labels(run).observe(work.balance)
        for kind in type(work.seconds).model_fields:
            self._seconds.labels(run, kind).observe(getattr(work.seconds, kind))

    def _count_assigns(self, run: str, rollout: Rollout, work: Work) -> None:
        self._assigns.labels(run, "valid").inc(work.assigns.valid)
        for node in rollout.nodes:
            if node.invalid_because is not None:
                self._assigns.labels(run, node.invalid_because).inc()
        for outcome in UNEXECUTED:
            self._assigns.labels(run, outcome).inc(getattr(work.assigns, outcome))


def _flag(count: int) -> str:
    return "yes" if count else "no"
