"""The metrics that an engineer on call needs first.

Every metric lives in the registry of its own service instance, so two services in one process never mix. Labels whose
values are known have their series from the start, so that a board of an idle service shows 0 and a rate misses no first
event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Final, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Stage
from rollout_service.observability.telemetry.egress import egress_metrics, use_metrics
from rollout_service.observability.telemetry.families import Collected
from rollout_service.observability.telemetry.parallel import ParallelMetrics
from sandboxes.egress.messages import EgressCounts
from sandboxes.scheduling.pressure import Resource

STAGE_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
ACQUIRE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_KINDS: Final = ("prompt", "cached", "sampled")
ENDS: Final = (("completed", "finished"), ("failed", ""), ("cancelled", ""))
"""A state and a stop reason for each way in which a rollout can end."""
PRIMED_ENVIRONMENTS: Final = 100
"""The most environments with series before their first rollout has ended."""

M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """The metrics of one service. Callbacks given to `watch_*` are called on each read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._define_api()
        self._define_stages()
        self._define_sandboxes()
        self._define_runs()
        self._define_rollouts()
        self.parallel = ParallelMetrics(self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = (), known: Iterable[str] = ()) -> Counter:
        return _primed(Counter(name, text, labels, registry=self.registry), known)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = (), known: Iterable[str] = ()) -> Gauge:
        return _primed(Gauge(name, text, labels, registry=self.registry), known)

    def _histogram(self, name: str, text: str, label: str, buckets: Sequence[float], known: Iterable[str]) -> Histogram:
        return _primed(Histogram(name, text, [label], buckets=buckets, registry=self.registry), known)

    # --- the API ---

    def _define_api(self) -> None:
        self._refused_connections = self._counter(
            "rollout_http_refused_connections_total",
            "Connections closed because of the peer's behavior, before a route saw a request",
            ["reason"],
        )
        self._key_reloads = self._counter(
            "rollout_key_reloads_total",
            "Reloads of a changed keys file; a failed one left the keys as they were",
            ["outcome"],
            known=("succeeded", "failed"),
        )
        self._keys_outdated = self._gauge(
            "rollout_keys_outdated", "1 while the keys file is wrong, and older keys serve"
        )
        self._certificate_outdated = self._gauge(
            "rollout_certificate_outdated", "1 while a renewed certificate is wrong, and the older one serves"
        )
        self._certificate_expires = self._gauge(
            "rollout_certificate_expires_timestamp_seconds",
            "Unix time when the certificate that serves expires; +Inf without TLS, NaN if it cannot be read",
        )
        self._certificate_expires.set(math.inf)
        self._requests = self._counter(
            "rollout_http_requests_total", "Requests to the API", ["method", "route", "status"]
        )
        self._connections = self._gauge(
            "rollout_http_connections",
            "Connections to the API; pending ones have not sent a valid key yet",
            ["state"],
        )
        self._event_readers = self._gauge(
            "rollout_event_readers", "Open streams of the API", ["stream"], known=("events", "overview")
        )

    def count_request(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, str(status)).inc()

    def count_key_reload(self, succeeded: bool) -> None:
        self._key_reloads.labels("succeeded" if succeeded else "failed").inc()
        self._keys_outdated.set(not succeeded)

    def note_certificate(self, is_usable: bool) -> None:
        self._certificate_outdated.set(not is_usable)

    def watch_certificate(self, expires_at: Callable[[], float]) -> None:
        self._certificate_expires.set_function(expires_at)

    def count_refused_connection(self, reason: str) -> None:
        self._refused_connections.labels(reason).inc()

    def watch_connections(self, counts: Callable[[], Mapping[str, int]]) -> None:
        for state in counts():
            self._connections.labels(state).set_function(partial(_read, counts, state))

    @contextmanager
    def track_reader(self, stream: str) -> Iterator[None]:
        with self._event_readers.labels(stream).track_inprogress():
            yield

    # --- the stages ---

    def _define_stages(self) -> None:
        self._stage_active = self._gauge("rollout_stage_active", "Rollouts being worked on", ["stage"], Stage)
        self._stage_waiting = self._gauge("rollout_stage_waiting", "Rollouts waiting for a worker", ["stage"], Stage)
        self._stage_limit = self._gauge(
            "rollout_stage_limit",
            "Rollouts that may work in a stage (workers) and wait before it (queue)",
            ["stage", "kind"],
        )
        self._stage_duration = self._histogram("rollout_stage_seconds", "Time worked", "stage", STAGE_SECONDS, Stage)
        self._queue_duration = self._histogram(
            "rollout_stage_queue_seconds", "Time waited for a worker", "stage", STAGE_SECONDS, Stage
        )

        self._queued = self._gauge("rollout_queued", "Rollouts in the store that no node has begun; NaN if it fails")

    def set_queued(self, count: float) -> None:
        self._queued.set(count)

    def observe_queue_seconds(self, stage: Stage, seconds: float) -> None:
        self._queue_duration.labels(stage).observe(seconds)

    @contextmanager
    def track_waiting(self, stage: Stage) -> Iterator[None]:
        with self._stage_waiting.labels(stage).track_inprogress():
            yield

    @contextmanager
    def track_work(self, stage: Stage) -> Iterator[None]:
        with self._stage_active.labels(stage).track_inprogress(), self._stage_duration.labels(stage).time():
            yield

    def watch_stage(self, stage: Stage, limits: Mapping[str, Callable[[], float]]) -> None:
        for kind, limit in limits.items():
            self._stage_limit.labels(stage, kind).set_function(limit)

    # --- sandboxes ---

    def _define_sandboxes(self) -> None:
        self._sandboxes = self._gauge(
            "rollout_sandboxes",
            "Sandboxes: in_use, paused among these, warm, waiting to be started, target at this pressure, ceiling, "
            "lingering when closed",
            ["state"],
        )
        self._acquire_duration = self._histogram(
            "rollout_sandbox_acquire_seconds",
            "Time to get a sandbox, by whether it was warm",
            "start",
            ACQUIRE_SECONDS,
            known=("warm", "cold"),
        )
        self._refill_failures = self._counter(
            "rollout_sandbox_refill_failures_total", "Warm sandboxes that could not be started"
        )
        self._shared_setups = self._counter(
            "rollout_shared_setups_total",
            "Uses of an instance's prepared files: made for it, or reused",
            ["outcome"],
            known=("made", "reused"),
        )
        self._holds = self._counter(
            "rollout_sandbox_holds_total",
            "Sandboxes whose start was throttled, by the reason",
            ["resource"],
            known=get_args(Resource),
        )
        self._limit_violations = self._counter(
            "rollout_sandbox_breaches_total",
            "Sandbox limits that agents' code reached",
            ["limit"],
            known=("memory", "processes", "disk", "watches", "time", "output"),
        )
        self._pauses = self._counter(
            "rollout_sandbox_pauses_total",
            "Sandboxes that were paused while their agent waited for the engine, or could not be",
            ["outcome"],
            known=("paused", "failed"),
        )
        self._reclaimed = self._counter(
            "rollout_sandbox_reclaimed_bytes_total", "Memory of paused sandboxes that the host got back"
        )
        self._sandbox_saves = self._counter(
            "rollout_sandbox_saves_total",
            "Sandboxes of agents at work that were saved, or why not",
            ["outcome"],
            known=("saved", "refused", "large", "full", "slow", "failed"),
        )

    def watch_sandboxes(self, counts: Mapping[str, Callable[[], float]]) -> None:
        for state, count in counts.items():
            self._sandboxes.labels(state).set_function(count)

    def watch_egress(self, counts: Callable[[], EgressCounts]) -> None:
        self.registry.register(Collected(lambda: egress_metrics(counts())))

    def watch_use(self, seconds: Callable[[], float]) -> None:
        self.registry.register(Collected(lambda: use_metrics(seconds())))

    def acquired(self, *, warm: bool, seconds: float) -> None:
        self._acquire_duration.labels("warm" if warm else "cold").observe(seconds)

    def refill_failed(self) -> None:
        self._refill_failures.inc()

    def held_back(self, resource: str) -> None:
        self._holds.labels(resource).inc()

    def count_shared_setup(self, was_made: bool) -> None:
        """Count a sandbox that starts from prepared files, as `reused` if they existed before."""
        self._shared_setups.labels("reused" if was_made else "made").inc()

    def count_pause(self, outcome: str) -> None:
        self._pauses.labels(outcome).inc()

    def count_sandbox_save(self, outcome: str) -> None:
        self._sandbox_saves.labels(outcome).inc()

    def count_reclaimed(self, size: int) -> None:
        self._reclaimed.inc(size)

    def count_limit_violation(self, limit: str) -> None:
        self._limit_violations.labels(limit).inc()

    # --- runs ---

    def _define_runs(self) -> None:
        self._run_groups = self._gauge(
            "rollout_run_groups",
            "Groups of the runs in progress, by state; dropped groups by reason",
            ["run", "state"],
        )
        self._run_acceptance = self._gauge(
            "rollout_run_acceptance_rate", "Share of groups expected to pass the filters", ["run"]
        )
        self._backlog = self._gauge("rollout_backlog", "Rollouts of a run that wait to be begun", ["run"])
        self._dropped_in_a_row = self._gauge(
            "rollout_run_dropped_in_a_row",
            "Groups of a run that were dropped since the last one that was kept",
            ["run"],
        )
        self._run_problems = self._counter(
            "rollout_run_problems_total", "Runs that were stopped by an error, by its code", ["code"]
        )

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
            self._run_groups.labels(run, state).set(count)
        self._run_acceptance.labels(run).set(acceptance_rate)
        self._backlog.labels(run).set(backlog)
        self._dropped_in_a_row.labels(run).set(dropped_in_a_row)

    def clear_run(self, run: str) -> None:
        for gauge in (self._run_groups, self._run_acceptance, self._backlog, self._dropped_in_a_row):
            gauge.remove_by_labels({"run": run})
        self.parallel.clear(run)

    def count_stopped_run(self, error: ErrorInfo) -> None:
        self._run_problems.labels(error.code).inc()

    # --- rollouts ---

    def _define_rollouts(self) -> None:
        self._finished = self._counter(
            "rollout_finished_total",
            "Rollouts that reached a terminal state",
            ["environment", "state", "stop_reason"],
        )
        self._errors = self._counter(
            "rollout_errors_total", "Failed attempts, by the boundary crossed", ["boundary", "code", "stage"]
        )
        self._retries = self._counter("rollout_retries_total", "Attempts that were retried", ["code"])
        self._resumes = self._counter(
            "rollout_resumes_total",
            "Interrupted rollouts that were taken up: resumed from their last turn, shortened to the turns of their "
            "saved sandbox or begun_anew for a reason",
            ["outcome", "reason"],
        )
        self._resumed_turns = self._counter(
            "rollout_resumed_turns_total",
            "Turns that were not sampled again, since their rollout was resumed",
        )
        self._saved_turns = self._counter(
            "rollout_saved_turns_total",
            "Turns saved to continue from after an interruption; dropped ones can be sampled again",
            ["outcome"],
            known=("saved", "dropped"),
        )
        self._lost_leases = self._counter("rollout_lost_leases_total", "Results discarded because the lease was lost")
        self._tokens = self._counter("rollout_tokens_total", "Tokens, by kind", ["kind"], TOKEN_KINDS)
        self._turns = self._counter("rollout_turns_total", "Turns of the policy")

    def count_failure(self, error: ErrorInfo) -> None:
        self._errors.labels(error.boundary, error.code, error.stage or "").inc()

    def count_retry(self, error: ErrorInfo) -> None:
        self._retries.labels(error.code).inc()

    def count_resume(self, outcome: str, reason: str, turns: int) -> None:
        """Count an interrupted rollout that was taken up, and the turns that need not be sampled again."""
        self._resumes.labels(outcome, reason).inc()
        self._resumed_turns.inc(turns)

    def count_saved_turns(self, outcome: str, turns: int) -> None:
        self._saved_turns.labels(outcome).inc(turns)

    def count_lost_lease(self) -> None:
        self._lost_leases.inc()

    def expect(self, environments: Iterable[str]) -> None:
        """Make series for these environments, unless there are too many."""
        for environment in islice(environments, PRIMED_ENVIRONMENTS):
            for end in ENDS:
                self._finished.labels(environment, *end)

    def count_finished(self, rollout: Rollout) -> None:
        labels = (rollout.task.environment, rollout.state, rollout.stop_reason or "")
        self._finished.labels(*labels).inc()
        self._turns.inc(rollout.usage.turns)
        for kind in TOKEN_KINDS:
            self._tokens.labels(kind).inc(getattr(rollout.usage, f"{kind}_tokens"))


def _primed(metric: M, known: Iterable[str]) -> M:
    """Create series for the known values of the only label."""
    for value in known:
        metric.labels(value)
    return metric


def _read(counts: Callable[[], Mapping[str, int]], state: str) -> float:
    return counts()[state]
