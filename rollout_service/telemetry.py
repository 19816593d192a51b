"""Metrics and logs: what an engineer who is paged needs to see first.

Every metric lives in a registry of its own service instance, so that two services in one process never mix.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, Stage
from rollout_service.settings import LogFormat

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)


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
        self._waiting = Gauge(
            "rollout_stage_waiting", "Rollouts waiting for a worker", ["stage"], registry=self.registry
        )
        self._tokens = Counter("rollout_tokens_total", "Tokens, by kind", ["kind"], registry=self.registry)
        self._turns = Counter("rollout_turns_total", "Turns of the policy", registry=self.registry)
        self._requests = Counter(
            "rollout_http_requests_total",
            "Requests of the API",
            ["method", "route", "status"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def request(self, method: str, route: str, status: int) -> None:
        """Count a request of the API."""
        self._requests.labels(method, route, str(status)).inc()

    def waited(self, stage: Stage, seconds: float) -> None:
        """Record how long a rollout waited for a worker."""
        self._queue_seconds.labels(stage).observe(seconds)

    @contextmanager
    def waiting(self, stage: Stage) -> Iterator[None]:
        """Count a rollout as waiting for a worker of this stage."""
        with self._waiting.labels(stage).track_inprogress():
            yield

    @contextmanager
    def working(self, stage: Stage) -> Iterator[None]:
        """Count a rollout as worked on in this stage, and time it."""
        with self._active.labels(stage).track_inprogress(), self._stage_seconds.labels(stage).time():
            yield

    def failed(self, error: ErrorInfo) -> None:
        """Count a failed attempt."""
        self._errors.labels(error.boundary, error.code, error.stage or "").inc()

    def retried(self, error: ErrorInfo) -> None:
        """Count an attempt that is tried again."""
        self._retries.labels(error.code).inc()

    def lost_lease(self) -> None:
        """Count a result that nobody wanted any more."""
        self._lost.inc()

    def finished(self, rollout: Rollout) -> None:
        """Count a rollout that reached its terminal state, and what it cost."""
        self._finished.labels(rollout.task.environment, rollout.state, rollout.stop_reason or "").inc()
        self._turns.inc(rollout.usage.turns)
        for kind in ("prompt", "cached", "sampled"):
            self._tokens.labels(kind).inc(getattr(rollout.usage, f"{kind}_tokens"))


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Send the log of this process to stderr: for people, or as one JSON object a line."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format is LogFormat.JSON
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format is LogFormat.JSON:
        shared.append(structlog.processors.format_exc_info)
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
