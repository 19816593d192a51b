"""Metrics of what is stuck, of the event loop's delay, and of the oldest work in each stage, read when the metrics are.

Guarantee: every kind, verdict and stage has a value at all times, so that an alert never meets an absent series.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.activity import ActivityBoard
from rollout_service.server.hangs.heartbeat import EVENT_LOOP
from rollout_service.server.hangs.signs.runs import RUN
from rollout_service.server.hangs.signs.versions import WEIGHTS


@dataclass(frozen=True, slots=True)
class HangMetrics(Collector):
    """The metrics of the watch."""

    findings: Callable[[], Iterable[HangFinding]]
    lag: Callable[[], float]
    board: ActivityBoard

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        stuck = GaugeMetricFamily(
            "rollout_stuck",
            "Rollouts that wait longer than usual by what they wait for, and runs and engines with a problem",
            labels=["kind", "verdict"],
        )
        counts: Counter[tuple[str, str]] = Counter()
        for finding in self.findings():
            counts[finding.kind, finding.verdict] += max(1, finding.count)
        for kind in (*StepKind, EVENT_LOOP, RUN, WEIGHTS):
            for verdict in HangVerdict:
                stuck.add_metric([kind, verdict], counts[kind, verdict])
        yield stuck
        yield GaugeMetricFamily(
            "rollout_loop_lag_seconds",
            "The greatest delay of the event loop within the last ten seconds",
            self.lag(),
        )
        oldest = GaugeMetricFamily(
            "rollout_stage_oldest_seconds",
            "How long the oldest rollout in a stage has been worked on",
            labels=["stage"],
        )
        now = time.perf_counter()
        for stage, seconds in oldest_in_stages(self.board, now).items():
            oldest.add_metric([stage], seconds)
        yield oldest


def oldest_in_stages(board: ActivityBoard, now: float) -> dict[Stage, float]:
    """Return for each stage how long the oldest rollout in it has been worked on; 0 if there is none."""
    oldest = dict.fromkeys(Stage, 0.0)
    for activity in board.all():
        if activity.stage is not None and activity.working_since is not None:
            oldest[activity.stage] = max(oldest[activity.stage], now - activity.working_since)
    return oldest
