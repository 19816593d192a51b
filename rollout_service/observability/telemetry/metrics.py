"""The metrics that an engineer on call needs first, one row each.

Guarantees: every metric lives in the registry of its own service instance, so two services in one process never mix.
Labels whose values are known have their series from the start, so that a board of an idle service shows 0 and a rate
misses no first event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Stage
from rollout_service.observability.telemetry.egress import EgressCollector, UseCollector
from rollout_service.observability.telemetry.parallel import ParallelMetrics
from sandboxes.egress.messages import EgressCounts
from sandboxes.scheduling.pressure import Resource

STAGE_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
ACQUIRE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


BY_STAGE: Final = tuple((stage.value,) for stage in Stage)
RESOURCES: Final = tuple((resource,) for resource in get_args(Resource))
LIMITS: Final = tuple((limit,) for limit in ("memory", "processes", "disk", "watches", "time", "output"))
TOKEN_KINDS: Final = ("prompt", "cached", "sampled")
ENDS: Final = (("completed", "finished"), ("failed", ""), ("cancelled", ""))
"""A state and a stop reason for each way in which a rollout can end."""
PRIMED_ENVIRONMENTS: Final = 100
"""The most environments whose series exist before their first rollout has ended."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets."""
    known: tuple[tuple[str, ...], ...] = ()
    """The values of the labels of series that exist from the start."""


FINISHED: Final = MetricSpec(
    "rollout_finished_total",
    "Rollouts that reached a terminal state",
    ("environment", "state", "stop_reason"),
)
ERRORS: Final = MetricSpec(
    "rollout_errors_total", "Failed attempts, by the boundary crossed", ("boundary", "code", "stage")
)
RETRIES: Final = MetricSpec("rollout_retries_total", "Attempts that were retried", ("code",))
RESUMES: Final = MetricSpec(
    "rollout_resumes_total",
    "Interrupted rollouts that were taken up: resumed from their last turn, shortened to the turns of their saved "
    "sandbox or begun_anew for a reason",
    ("outcome", "reason"),
)
RESUMED_TURNS: Final = MetricSpec(
    "rollout_resumed_turns_total", "Turns that were not sampled again, since their rollout was resumed"
)
SAVED_TURNS: Final = MetricSpec(
    "rollout_saved_turns_total",
    "Turns saved to continue from after an interruption; dropped ones can be sampled again",
    ("outcome",),
    known=(("saved",), ("dropped",)),
)
LOST_LEASES: Final = MetricSpec("rollout_lost_leases_total", "Results discarded because the lease was lost")
REFILL_FAILURES: Final = MetricSpec(
    "rollout_sandbox_refill_failures_total", "Warm sandboxes that could not be started"
)
SHARED_SETUPS: Final = MetricSpec(
    "rollout_shared_setups_total",
    "Uses of an instance's prepared files: made for it, or reused",
    ("outcome",),
    known=(("made",), ("reused",)),
)
HOLDS: Final = MetricSpec(
    "rollout_sandbox_holds_total",
    "Sandboxes whose start was throttled, by the reason",
    ("resource",),
    known=RESOURCES,
)
LIMIT_VIOLATIONS: Final = MetricSpec(
    "rollout_sandbox_breaches_total", "Sandbox limits that agents' code reached", ("limit",), known=LIMITS
)
RUN_PROBLEMS: Final = MetricSpec(
    "rollout_run_problems_total", "Runs that were stopped by an error, by its code", ("code",)
)
TOKENS: Final = MetricSpec(
    "rollout_tokens_total", "Tokens, by kind", ("kind",), known=tuple((kind,) for kind in TOKEN_KINDS)
)
PAUSES: Final = MetricSpec(
    "rollout_sandbox_pauses_total",
    "Sandboxes that were paused while their agent waited for the engine, or could not be",
    ("outcome",),
    known=(("paused",), ("failed",)),
)
RECLAIMED: Final = MetricSpec(
    "rollout_sandbox_reclaimed_bytes_total", "Memory of paused sandboxes that the host got back"
)
SANDBOX_SAVES: Final = MetricSpec(
    "rollout_sandbox_saves_total",
    "Sandboxes of agents at work that were saved, or why not",
    ("outcome",),
    known=tuple((outcome,) for outcome in ("saved", "refused", "large", "full", "slow", "failed")),
)
TURNS: Final = MetricSpec("rollout_turns_total", "Turns of the policy")
REFUSED_CONNECTIONS: Final = MetricSpec(
    "rollout_http_refused_connections_total",
    "Connections closed because of the peer's behavior, before a route saw a request",
    ("reason",),
)
KEY_RELOADS: Final = MetricSpec(
    "rollout_key_reloads_total",
    "Reloads of a changed keys file; a failed one left the keys as they were",
    ("outcome",),
    known=(("succeeded",), ("failed",)),
)
REQUESTS: Final = MetricSpec(
    "rollout_http_requests_total", "Requests to the API", ("method", "route", "status")
)
COUNTERS: Final = (
    FINISHED,
    ERRORS,
    RETRIES,
    RESUMES,
    RESUMED_TURNS,
    SAVED_TURNS,
    LOST_LEASES,
    REFILL_FAILURES,
    SHARED_SETUPS,
    PAUSES,
    SANDBOX_SAVES,
    RECLAIMED,
    HOLDS,
    LIMIT_VIOLATIONS,
    RUN_PROBLEMS,
    TOKENS,
    TURNS,
    REFUSED_CONNECTIONS,
    KEY_RELOADS,
    REQUESTS,
)

STAGE_ACTIVE: Final = MetricSpec(
    "rollout_stage_active", "Rollouts being worked on", ("stage",), known=BY_STAGE
)
STAGE_WAITING: Final = MetricSpec(
    "rollout_stage_waiting", "Rollouts waiting for a worker", ("stage",), known=BY_STAGE
)
STAGE_LIMIT: Final = MetricSpec(
    "rollout_stage_limit",
    "Rollouts that may work in a stage (workers) and wait before it (queue)",
    ("stage", "kind"),
)
SANDBOXES: Final = MetricSpec(
    "rollout_sandboxes",
    "Sandboxes: in_use, paused among these, warm, waiting to be started, target at this pressure, ceiling, "
    "lingering when closed",
    ("state",),
)
CONNECTIONS: Final = MetricSpec(
    "rollout_http_connections",
    "Connections to the API; pending ones have not sent a valid key yet",
    ("state",),
)
RUN_GROUPS: Final = MetricSpec(
    "rollout_run_groups",
    "Groups of the runs in progress, by state; dropped groups by reason",
    ("run", "state"),
)
RUN_ACCEPTANCE: Final = MetricSpec(
    "rollout_run_acceptance_rate", "Share of groups expected to pass the filters", ("run",)
)
BACKLOG: Final = MetricSpec("rollout_backlog", "Rollouts of a run that wait to be begun", ("run",))
DROPPED_IN_A_ROW: Final = MetricSpec(
    "rollout_run_dropped_in_a_row",
    "Groups of a run that were dropped since the last one that was kept",
    ("run",),
)
EVENT_READERS: Final = MetricSpec(
    "rollout_event_readers", "Open streams of the API", ("stream",), known=(("events",), ("overview",))
)
GAUGES: Final = (
    STAGE_ACTIVE,
    STAGE_WAITING,
    STAGE_LIMIT,
    SANDBOXES,
    CONNECTIONS,
    RUN_GROUPS,
    RUN_ACCEPTANCE,
    BACKLOG,
    DROPPED_IN_A_ROW,
    EVENT_READERS,
)

STAGE_DURATION: Final = MetricSpec(
    "rollout_stage_seconds", "Time worked", ("stage",), STAGE_SECONDS, BY_STAGE
)
QUEUE_DURATION: Final = MetricSpec(
    "rollout_stage_queue_seconds", "Time waited for a worker", ("stage",), STAGE_SECONDS, BY_STAGE
)
ACQUIRE_DURATION: Final = MetricSpec(
    "rollout_sandbox_acquire_seconds",
    "Time to get a sandbox, by whether it was warm",
    ("start",),
    ACQUIRE_SECONDS,
    (("warm",), ("cold",)),
)
HISTOGRAMS: Final = (STAGE_DURATION, QUEUE_DURATION, ACQUIRE_DURATION)


class Metrics:
    """The metrics of one service. What `watch_*` is given is read whenever the metrics are."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            spec: Counter(spec.name, spec.help, spec.labels, registry=self.registry) for spec in COUNTERS
        }
        self._gauges = {
            spec: Gauge(spec.name, spec.help, spec.labels, registry=self.registry) for spec in GAUGES
        }
        self._histograms = {
            spec: Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self.registry)
            for spec in HISTOGRAMS
        }
        for metrics in (self._counters, self._gauges, self._histograms):
            for spec, metric in metrics.items():
                for values in spec.known:
                    metric.labels(*values)
        self.parallel = ParallelMetrics(self.registry)
        """The metrics of runs whose rollouts may have sub-agents."""

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    # --- the API ---

    def count_request(self, method: str, route: str, status: int) -> None:
        self._counters[REQUESTS].labels(method, route, str(status)).inc()

    def count_key_reload(self, succeeded: bool) -> None:
        self._counters[KEY_RELOADS].labels("succeeded" if succeeded else "failed").inc()

    def count_refused_connection(self, reason: str) -> None:
        self._counters[REFUSED_CONNECTIONS].labels(reason).inc()

    def watch_connections(self, counts: Callable[[], Mapping[str, int]]) -> None:
        for state in counts():
            self._gauges[CONNECTIONS].labels(state).set_function(partial(_read, counts, state))

    @contextmanager
    def track_reader(self, stream: str) -> Iterator[None]:
        with self._gauges[EVENT_READERS].labels(stream).track_inprogress():
            yield

    # --- the stages ---

    def observe_queue_seconds(self, stage: Stage, seconds: float) -> None:
        self._histograms[QUEUE_DURATION].labels(stage).observe(seconds)

    @contextmanager
    def track_waiting(self, stage: Stage) -> Iterator[None]:
        with self._gauges[STAGE_WAITING].labels(stage).track_inprogress():
            yield

    @contextmanager
    def track_work(self, stage: Stage) -> Iterator[None]:
        active, duration = self._gauges[STAGE_ACTIVE], self._histograms[STAGE_DURATION]
        with active.labels(stage).track_inprogress(), duration.labels(stage).time():
            yield

    def watch_stage(self, stage: Stage, limits: Mapping[str, Callable[[], float]]) -> None:
        for kind, limit in limits.items():
            self._gauges[STAGE_LIMIT].labels(stage, kind).set_function(limit)

    # --- sandboxes ---

    def watch_sandboxes(self, counts: Mapping[str, Callable[[], float]]) -> None:
        for state, count in counts.items():
            self._gauges[SANDBOXES].labels(state).set_function(count)

    def watch_egress(self, counts: Callable[[], EgressCounts]) -> None:
        self.registry.register(EgressCollector(counts))

    def watch_use(self, seconds: Callable[[], float]) -> None:
        self.registry.register(UseCollector(seconds))

    def acquired(self, *, warm: bool, seconds: float) -> None:
        self._histograms[ACQUIRE_DURATION].labels("warm" if warm else "cold").observe(seconds)

    def refill_failed(self) -> None:
        self._counters[REFILL_FAILURES].inc()

    def held_back(self, resource: str) -> None:
        self._counters[HOLDS].labels(resource).inc()

    def count_shared_setup(self, was_made: bool) -> None:
        """Count a sandbox that starts from prepared files, which were made before or are new."""
        self._counters[SHARED_SETUPS].labels("reused" if was_made else "made").inc()

    def count_pause(self, outcome: str) -> None:
        self._counters[PAUSES].labels(outcome).inc()

    def count_sandbox_save(self, outcome: str) -> None:
        self._counters[SANDBOX_SAVES].labels(outcome).inc()

    def count_reclaimed(self, size: int) -> None:
        self._counters[RECLAIMED].inc(size)

    def count_limit_violation(self, limit: str) -> None:
        self._counters[LIMIT_VIOLATIONS].labels(limit).inc()

    # --- runs and rollouts ---

    def set_run(
        self,
        run: str,
        groups: Mapping[str, int],
        acceptance_rate: float,
        *,
        backlog: int = 0,
        dropped_in_a_row: int = 0,
    ) -> None:
        for state, count in groups.items():
            self._gauges[RUN_GROUPS].labels(run, state).set(count)
        self._gauges[RUN_ACCEPTANCE].labels(run).set(acceptance_rate)
        self._gauges[BACKLOG].labels(run).set(backlog)
        self._gauges[DROPPED_IN_A_ROW].labels(run).set(dropped_in_a_row)

    def clear_run(self, run: str) -> None:
        self._gauges[RUN_GROUPS].remove_by_labels({"run": run})
        self._gauges[RUN_ACCEPTANCE].remove_by_labels({"run": run})
        self._gauges[BACKLOG].remove_by_labels({"run": run})
        self._gauges[DROPPED_IN_A_ROW].remove_by_labels({"run": run})
        self.parallel.clear(run)

    def count_stopped_run(self, error: ErrorInfo) -> None:
        self._counters[RUN_PROBLEMS].labels(error.code).inc()

    def count_failure(self, error: ErrorInfo) -> None:
        self._counters[ERRORS].labels(error.boundary, error.code, error.stage or "").inc()

    def count_retry(self, error: ErrorInfo) -> None:
        self._counters[RETRIES].labels(error.code).inc()

    def count_resume(self, outcome: str, reason: str, turns: int) -> None:
        """Count an interrupted rollout that was taken up, and the turns that it need not sample again."""
        self._counters[RESUMES].labels(outcome, reason).inc()
        self._counters[RESUMED_TURNS].inc(turns)

    def count_saved_turns(self, outcome: str, turns: int) -> None:
        self._counters[SAVED_TURNS].labels(outcome).inc(turns)

    def count_lost_lease(self) -> None:
        self._counters[LOST_LEASES].inc()

    def expect(self, environments: Iterable[str]) -> None:
        """Make series for the rollouts of these environments, as far as they are few."""
        for environment in islice(environments, PRIMED_ENVIRONMENTS):
            for end in ENDS:
                self._counters[FINISHED].labels(environment, *end)

    def count_finished(self, rollout: Rollout) -> None:
        labels = (rollout.task.environment, rollout.state, rollout.stop_reason or "")
        self._counters[FINISHED].labels(*labels).inc()
        self._counters[TURNS].inc(rollout.usage.turns)
        for kind in TOKEN_KINDS:
            self._counters[TOKENS].labels(kind).inc(getattr(rollout.usage, f"{kind}_tokens"))


def _read(counts: Callable[[], Mapping[str, int]], state: str) -> float:
    return counts()[state]
