"""Metrics of the gateway.

A client that makes up names, for itself or for parameters, adds a bounded number of time series, and takes none from
the names that are known.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollout_service.gateway.capture import CaptureReport, PlannedTurn
from rollout_service.gateway.contract import ModelCall
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.dialects.base import KNOWN_CLIENTS

MAX_CLIENTS: Final = 32
"""Clients with time series of their own, beside the known ones."""
PARAMETERS: Final = frozenset(
    name for codec in CODECS.values() for row in codec.parameters.rows for name in (row.path, row.recorded_as)
)
OTHER: Final = "other"
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class CallOutcome(StrEnum):
    ANSWERED = "answered"
    """A turn was sampled and recorded."""
    REPEATED = "repeated"
    """It repeated a request, and got the answer that had not arrived."""
    LIMIT = "limit"
    """It got a closing text at the rollout's limit of turns or tokens."""
    OVERFLOW = "overflow"
    """Its prompt does not fit the model's context."""
    ABANDONED = "abandoned"
    """Its client went away and did not come back, or its rollout ended first."""
    REFUSED = "refused"
    """The request or its key is wrong."""
    FAILED = "failed"
    """No engine answered, or its messages could not be rendered."""


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._clients: set[str] = set()
        """Clients that are not known by name, and have time series of their own."""
        self._calls = counter(
            "rollout_gateway_calls_total",
            "Calls of model APIs, by what became of them",
            ["dialect", "client", "outcome"],
        )
        self._parameters = counter(
            "rollout_gateway_parameters_total",
            "Parameters of calls without effect: ignored, or recorded since sampling is the run's",
            ["parameter", "treatment"],
        )
        self._prompt_tokens = counter(
            "rollout_gateway_prompt_tokens_total",
            "Prompt tokens: kept from the turn that a call continues, or rendered",
            ["client", "kind"],
        )
        self._prompt_seconds = Histogram(
            "rollout_gateway_prompt_seconds",
            "Time to make a call's prompt, which the engine waits for",
            ["dialect"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._standings = counter(
            "rollout_gateway_echoes_total",
            "Answers in their client's history, by how they stood there",
            ["standing"],
        )
        self._forks = counter(
            "rollout_gateway_segments_total",
            "Segments of programs' conversations, by the reason why they began",
            ["reason"],
        )
        self._malformed = counter("rollout_gateway_malformed_calls_total", "Malformed tool calls that programs got")
        self._undelivered = counter(
            "rollout_gateway_undelivered_total",
            "Turns that are not trained on, since their client did not receive them",
        )
        self._sessions = Gauge("rollout_gateway_sessions", "Rollouts whose key is valid now", registry=registry)

    def count_call(self, call: ModelCall, outcome: CallOutcome) -> None:
        self._calls.labels(call.dialect, self._client(call.lane.client), outcome).inc()
        for name in call.ignored:
            self._parameters.labels(_parameter(name), "ignored").inc()
        for name in call.requested:
            self._parameters.labels(_parameter(name), "recorded").inc()

    def count_refused(self, dialect: str, client: str) -> None:
        """Count a request that is not a call, or has no valid key."""
        self._calls.labels(dialect, self._client(client), CallOutcome.REFUSED).inc()

    def observe_prompt(self, call: ModelCall, planned: PlannedTurn, seconds: float) -> None:
        client = self._client(call.lane.client)
        self._prompt_tokens.labels(client, "kept").inc(planned.known)
        self._prompt_tokens.labels(client, "rendered").inc(len(planned.prompt_ids) - planned.known)
        self._prompt_seconds.labels(call.dialect).observe(seconds)

    def count_report(self, report: CaptureReport) -> None:
        for standing, count in report.standings.items():
            self._standings.labels(standing).inc(count)
        for reason, count in report.forks.items():
            self._forks.labels(reason).inc(count)
        self._malformed.inc(report.malformed_calls)
        self._undelivered.inc(report.undelivered)

    def count_sessions(self, change: int) -> None:
        """Count sessions that began, or ended if negative."""
        self._sessions.inc(change)

    def _client(self, name: str) -> str:
        if name in KNOWN_CLIENTS or name in self._clients:
            return name
        if len(self._clients) >= MAX_CLIENTS:
            return OTHER
        self._clients.add(name)
        return name


def _parameter(name: str) -> str:
    """Return a parameter's label: its name if that is known, or that of the list in which it stands."""
    listed, bracket, _ = name.partition("[")
    label = f"{listed}[]" if bracket else name
    return label if listed in PARAMETERS else OTHER
