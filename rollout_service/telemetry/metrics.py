"""Metrics and logs: what an engineer who is paged needs to see first.

Every metric lives in a registry of its own service instance, so that two services in one process never mix.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Stage
from rollout_service.settings import LogFormat
from rollout_service.terminal_text import escape_controls
from sandboxes.egress.counts import EgressCounts

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
ACQUIRE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._finished = Counter(
            "rollout_finished_total",
            "Rollouts that reached a terminal state",
            ["environment", "state", "stop_reason"],
            registry=self.registry,
        )
        self._errors = Counter(
            "rollout_errors_total",
            "Failed attempts, by the boundary crossed",
            ["boundary", "code", "stage"],
            registry=self.registry,
        )
        self._retries = Counter(
            "rollout_retries_total", "Attempts that were tried again", ["code"], registry=self.registry
        )
        self._lost = Counter(
            "rollout_lost_leases_total", "Results dropped since the lease was lost", registry=self.registry
        )
        self._stage_seconds = Histogram(
            "rollout_stage_seconds", "Time worked", ["stage"], buckets=SECONDS, registry=self.registry
        )
        self._queue_seconds = Histogram(
            "rollout_stage_queue_seconds",
            "Time waited for a worker",
            ["stage"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._active = Gauge(
            "rollout_stage_active", "Rollouts being worked on", ["stage"], registry=self.registry
        )
        self._limit = Gauge(
            "rollout_stage_limit",
            "Rollouts that may work in a stage (workers) and wait before it (queue)",
            ["stage", "kind"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "rollout_stage_waiting", "Rollouts waiting for a worker", ["stage"], registry=self.registry
        )
        self._acquired = Histogram(
            "rollout_sandbox_acquire_seconds",
            "Time to get a sandbox, by whether it was started ahead",
            ["start"],
            buckets=ACQUIRE_SECONDS,
            registry=self.registry,
        )
        self._refill_failures = Counter(
            "rollout_sandbox_refill_failures_total",
            "Sandboxes that could not be started ahead",
            registry=self.registry,
        )
        self._holds = Counter(
            "rollout_sandbox_holds_total",
            "Sandboxes that had to wait, by what held them back",
            ["resource"],
            registry=self.registry,
        )
        self._limit_violations = Counter(
            "rollout_sandbox_breaches_total",
            "Limits of sandboxes that agents' code reached",
            ["limit"],
            registry=self.registry,
        )
        self._run_groups = Gauge(
            "rollout_run_groups",
            "Groups of runs under way, by what they are, dropped ones by reason",
            ["run", "state"],
            registry=self.registry,
        )
        self._run_acceptance = Gauge(
            "rollout_run_acceptance_rate",
            "Share of groups that are expected to pass the filters",
            ["run"],
            registry=self.registry,
        )
        self._run_problems = Counter(
            "rollout_run_problems_total",
            "Runs that were stopped since they could not go on, by the code of the error",
            ["code"],
            registry=self.registry,
        )
        self._tokens = Counter("rollout_tokens_total", "Tokens, by kind", ["kind"], registry=self.registry)
        self._turns = Counter("rollout_turns_total", "Turns of the policy", registry=self.registry)
        self._refused = Counter(
            "rollout_http_refused_connections_total",
            "Connections that were closed for what the peer did, before a route saw a request",
            ["reason"],
            registry=self.registry,
        )
        self._key_reloads = Counter(
            "rollout_key_reloads_total",
            "Readings of a changed keys file; one that failed left the keys as they were",
            ["outcome"],
            registry=self.registry,
        )
        self._requests = Counter(
            "rollout_http_requests_total",
            "Requests of the API",
            ["method", "route", "status"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_request(self, method: str, route: str, status: int) -> None:
        """Count a request of the API."""
        self._requests.labels(method, route, str(status)).inc()

    def count_key_reload(self, succeeded: bool) -> None:
        """Count a reading of the keys file."""
        self._key_reloads.labels("succeeded" if succeeded else "failed").inc()

    def count_refused_connection(self, reason: str) -> None:
        """Count a connection that was closed for what its peer did."""
        self._refused.labels(reason).inc()

    def watch_connections(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Show the open connections by state, asked for when metrics are."""
        gauge = Gauge(
            "rollout_http_connections",
            "Connections to the API: pending ones have sent no valid key yet",
            ["state"],
            registry=self.registry,
        )
        for state in counts():
            gauge.labels(state).set_function(partial(_one, counts, state))

    def observe_queue_seconds(self, stage: Stage, seconds: float) -> None:
        """Record how long a rollout waited for a worker."""
        self._queue_seconds.labels(stage).observe(seconds)

    @contextmanager
    def track_waiting(self, stage: Stage) -> Iterator[None]:
        """Count a rollout as waiting for a worker of this stage."""
        with self._waiting.labels(stage).track_inprogress():
            yield

    @contextmanager
    def track_work(self, stage: Stage) -> Iterator[None]:
        """Count a rollout as worked on in this stage, and time it."""
        with self._active.labels(stage).track_inprogress(), self._stage_seconds.labels(stage).time():
            yield

    def watch_stage(self, stage: Stage, limits: Mapping[str, Callable[[], float]]) -> None:
        """Show a stage's limits, asked for when metrics are."""
        for kind, limit in limits.items():
            self._limit.labels(stage, kind).set_function(limit)

    def watch_sandboxes(self, counts: Mapping[str, Callable[[], float]]) -> None:
        """Show what is alive: `rollout_sandboxes` with each of these states, asked for when metrics are."""
        gauge = Gauge(
            "rollout_sandboxes",
            "Sandboxes: in_use, warm, waiting to be started, target at this pressure, ceiling, lingering when closed",
            ["state"],
            registry=self.registry,
        )
        for state, count in counts.items():
            gauge.labels(state).set_function(count)

    def watch_egress(self, counts: Callable[[], EgressCounts]) -> None:
        """Show what went out of sandboxes that are held to a list of hosts, asked for when metrics are."""
        self.registry.register(_EgressCollector(counts))

    def acquired(self, *, warm: bool, seconds: float) -> None:
        """Record how long it took to get a sandbox."""
        self._acquired.labels("warm" if warm else "cold").observe(seconds)

    def refill_failed(self) -> None:
        """Count a sandbox that could not be started ahead."""
        self._refill_failures.inc()

    def held_back(self, resource: str) -> None:
        """Count a sandbox that has to wait."""
        self._holds.labels(resource).inc()

    def count_limit_violation(self, limit: str) -> None:
        """Count a limit of a sandbox that an agent's code reached."""
        self._limit_violations.labels(limit).inc()

    def set_run(self, run: str, groups: Mapping[str, int], acceptance_rate: float) -> None:
        """Show where the groups of a run are."""
        for state, count in groups.items():
            self._run_groups.labels(run, state).set(count)
        self._run_acceptance.labels(run).set(acceptance_rate)

    def count_stopped_run(self, error: ErrorInfo) -> None:
        """Count a run that could not go on."""
        self._run_problems.labels(error.code).inc()

    def clear_run(self, run: str) -> None:
        """Show a run no longer."""
        self._run_groups.remove_by_labels({"run": run})
        self._run_acceptance.remove_by_labels({"run": run})

    def count_failure(self, error: ErrorInfo) -> None:
        """Count a failed attempt."""
        self._errors.labels(error.boundary, error.code, error.stage or "").inc()

    def count_retry(self, error: ErrorInfo) -> None:
        """Count an attempt that is tried again."""
        self._retries.labels(error.code).inc()

    def count_lost_lease(self) -> None:
        """Count a result that nobody wanted any more."""
        self._lost.inc()

    def count_finished(self, rollout: Rollout) -> None:
        """Count a rollout that reached its terminal state, and what it cost."""
        self._finished.labels(rollout.task.environment, rollout.state, rollout.stop_reason or "").inc()
        self._turns.inc(rollout.usage.turns)
        for kind in ("prompt", "cached", "sampled"):
            self._tokens.labels(kind).inc(getattr(rollout.usage, f"{kind}_tokens"))


def _one(counts: Callable[[], Mapping[str, int]], state: str) -> float:
    return counts()[state]


class _EgressCollector(Collector):
    """Counters that a process of the proxies counts, and not this one."""

    def __init__(self, counts: Callable[[], EgressCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The counters as they are now."""
        counts = self._counts()
        yield CounterMetricFamily(
            "rollout_egress_connections",
            "Connections of sandboxes to their proxies",
            value=counts.connections,
        )
        size = CounterMetricFamily(
            "rollout_egress_bytes", "Bytes between sandboxes and hosts of their lists", labels=["direction"]
        )
        size.add_metric(["out"], counts.bytes_out)
        size.add_metric(["in"], counts.bytes_in)
        yield size
        refused = CounterMetricFamily(
            "rollout_egress_refused", "Requests of sandboxes that their proxies refused", labels=["reason"]
        )
        for reason, number in sorted(counts.refused.items()):
            refused.add_metric([reason], number)
        yield refused


def _safe_values(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape what a terminal would obey: errors quote programs in sandboxes, policies and engines."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = escape_controls(value)
    return event


def _plain_traceback(output: TextIO, error: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    output.write(escape_controls(text.getvalue()))


def _name_uvicorn(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Name uvicorn's logger after the program: it logs everything to `uvicorn.error`, whatever the level."""
    if event.get("logger") == "uvicorn.error":
        event["logger"] = "uvicorn"
    return event


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Send the log of this process to stderr: for people, or as one JSON object a line."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format is LogFormat.JSON
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_plain_traceback)
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        _name_uvicorn,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    shared.append(structlog.processors.format_exc_info if log_format is LogFormat.JSON else _safe_values)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
