"""The metrics of live sessions: the funnel from a served turn to a batch, and the delays on the way.

Turns delivered, dropped and waiting add up to those served, since all are read at once. No text of a session becomes a
label or a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

import anyio
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from api_schemas.sessions import FeedbackByVersion
from rollout_service.base.errors import StoreError
from rollout_service.live.contract import TurnMarkRecord, TurnRecord
from rollout_service.live.sqlite.store import SqliteLiveStore

log = structlog.get_logger(__name__)

HELD_SECONDS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 15, 20, 25, 30, 60)
JUDGE_SECONDS: Final = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3_600)
PART_SECONDS: Final = (1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)
REFRESH_SECONDS: Final = 2.0
"""How long a reader of the metrics waits for the store; then it gets the last figures."""
VERSIONS: Final = 8
"""The newest versions of each pool have series."""
STEPS: Final = ("served", "recorded", "judged")
DROPPED: Final = "dropped:"


class LiveMetrics:
    """The parts of live sessions report to it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._values = counter(
            "rollout_live_values_total",
            "Values given to turns, by source and by value: minus, zero, plus, or none",
            ["source", "value"],
        )
        self._judge_seconds = histogram(
            "rollout_live_judge_seconds",
            "Time from what followed a turn to its value or the judge's failure",
            buckets=JUDGE_SECONDS,
        )
        self._compared = counter(
            "rollout_live_compared_total",
            "Turns with a user's and a judge's value, by whether both point the same way",
            ["agree"],
        )
        self._part_seconds = histogram(
            "rollout_live_part_seconds",
            "Time that a part waited for others to fill a batch of its run",
            buckets=PART_SECONDS,
        )
        self._held = histogram(
            "rollout_live_held_seconds",
            "Time that requests of sessions waited for a paused pool, by outcome: served or refused",
            ["pool", "outcome"],
            buckets=HELD_SECONDS,
        )
        self._redactions = counter("rollout_live_redactions_total", "What detectors found in turns, by kind", ["kind"])
        self._unrecorded = counter(
            "rollout_live_unrecorded_total",
            "Requests that were served and belong to no session, by reason",
            ["reason"],
        )

    def judged(self, turn: TurnRecord, mark: TurnMarkRecord) -> None:
        """Count a value, or the failure to find one, and its time."""
        source = mark.source.partition(":")[0]
        self._values.labels(source, _sign(mark.value)).inc()
        if turn.next_state is not None and source != "explicit":
            self._judge_seconds.observe(max(0.0, mark.at - turn.next_state.arrived_at))

    def compared(self, *, judged: float, explicit: float) -> None:
        self._compared.labels("yes" if _sign(judged) == _sign(explicit) else "no").inc()

    def handed_over(self, seconds: float) -> None:
        self._part_seconds.observe(seconds)

    def held(self, pool: str, seconds: float, *, refused: bool) -> None:
        self._held.labels(pool, "refused" if refused else "served").observe(seconds)

    def redacted(self, kinds: Mapping[str, int]) -> None:
        for kind, count in kinds.items():
            self._redactions.labels(kind).inc(count)

    def unrecorded(self, reason: str) -> None:
        self._unrecorded.labels(reason).inc()


@dataclass(eq=False)
class LiveFunnel(Collector):
    """The store's figures, as of the last `refresh`."""

    store: SqliteLiveStore
    _: KW_ONLY
    open_sessions: Callable[[], int]
    judge_queue: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._counts: Mapping[str, int] = {}
        self._versions: Sequence[FeedbackByVersion] = ()
        self._oldest: float | None = None

    async def refresh(self) -> None:
        """Keep the last figures if the store takes too long or fails."""
        try:
            with anyio.fail_after(REFRESH_SECONDS):
                counts = await self.store.counts()
                versions = await self.store.feedback()
                waiting = await self.store.to_judge(1)
        except StoreError:
            return  # it says so itself
        except TimeoutError:
            log.warning("the figures of live sessions could not be read in time")
            return
        self._counts, self._versions = counts, versions
        self._oldest = waiting[0].since if waiting else None

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("rollout_live_sessions", "Open sessions", self.open_sessions())
        yield GaugeMetricFamily("rollout_live_judge_queue", "Turns that the judge has in memory", self.judge_queue())
        age = 0.0 if self._oldest is None else max(0.0, self.clock() - self._oldest)
        yield GaugeMetricFamily(
            "rollout_live_judge_age_seconds", "How long a turn has waited for the judge, at most", age
        )
        yield from self._funnel()
        yield from self._satisfied()

    def _funnel(self) -> Iterator[Metric]:
        for step in STEPS:
            name = f"rollout_live_{step}"
            yield CounterMetricFamily(name, f"Turns of sessions that were {step}", self._counts.get(step, 0))
        turns = GaugeMetricFamily(
            "rollout_live_turns",
            "Served turns by what became of them: delivered, waiting, or dropped for a reason",
            labels=["state", "reason"],
        )
        for state in ("delivered", "waiting"):
            turns.add_metric([state, ""], self._counts.get(state, 0))
        for name, count in sorted(self._counts.items()):
            if name.startswith(DROPPED):
                turns.add_metric(["dropped", name.removeprefix(DROPPED)], count)
        yield turns

    def _satisfied(self) -> Iterator[Metric]:
        share = GaugeMetricFamily(
            "rollout_live_satisfied_share", "Share of values above 0 by version", labels=["pool", "version"]
        )
        valued = GaugeMetricFamily(
            "rollout_live_valued_turns", "Turns with a value by version", labels=["pool", "version"]
        )
        for one in newest(self._versions):
            share.add_metric([one.pool, str(one.version)], one.satisfied)
            valued.add_metric([one.pool, str(one.version)], one.turns)
        yield share
        yield valued


def newest(figures: Sequence[FeedbackByVersion]) -> Iterator[FeedbackByVersion]:
    seen: dict[str, int] = {}
    for one in sorted(figures, key=lambda one: (one.pool, -one.version)):
        seen[one.pool] = seen.get(one.pool, 0) + 1
        if seen[one.pool] <= VERSIONS:
            yield one


def _sign(value: float | None) -> str:
    if value is None:
        return "none"
    return "plus" if value > 0 else "minus" if value < 0 else "zero"
