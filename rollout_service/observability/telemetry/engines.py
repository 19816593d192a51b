"""Metrics of engines, as the pools see them.

Each registered backend has its series from the start, with 0 for events that have not happened, so a rate misses no
first event; they go with the backend. A pool keeps its histograms for as long as the service runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

from api_schemas.inference import BackendView, PoolOutcome
from rollout_service.engines.routing.contract import Decision, RequestEnd
from rollout_service.observability.telemetry.families import gauge

REQUEST_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
LOAD_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 900)
UPDATES: Final = ("loaded", "partly", "failed")


log = structlog.get_logger(__name__)
_PARTS = ("backend_id", "held_tokens", "wait", "prefill", "move", "contention", "total")
_SHARES = (-1.0, -0.5, -0.2, -0.1, -0.05, -0.01, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


class RoutingTrace:
    """Counts routing decisions, and logs them in full at debug level; implements `engines.routing.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._logger = logging.getLogger(__name__)
        decisions = Counter(
            "rollout_routing_decisions_total",
            "Backends chosen for a request, by the reason",
            ["pool", "reason"],
            registry=registry,
        )
        tokens = Counter(
            "rollout_routing_prompt_tokens_total",
            "Prompt tokens: sent, expected in a backend's cache, and found there (cached)",
            ["pool", "kind"],
            registry=registry,
        )
        errors = Histogram(
            "rollout_routing_prediction_error",
            "Cached minus expected tokens, as a share of the prompt",
            ["pool"],
            buckets=_SHARES,
            registry=registry,
        )
        # Every turn needs each of them, and looking them up is expensive.
        self._decisions = cache(decisions.labels)
        self._tokens = cache(tokens.labels)
        self._errors = cache(errors.labels)

    def decided(self, pool: str, decision: Decision) -> None:
        self._decisions(pool, decision.reason).inc()
        if self._logger.isEnabledFor(logging.DEBUG):
            log.debug(
                "routed",
                pool=pool,
                rollout_id=decision.affinity,
                backend_id=decision.backend_id,
                reason=decision.reason.value,
                prompt_tokens=decision.prompt_tokens,
                candidates=[{part: getattr(cost, part) for part in _PARTS} for cost in decision.costs],
            )

    def served(self, pool: str, decision: Decision, cached_tokens: int) -> None:
        """Record that a backend answered and found `cached_tokens` of the prompt in its cache."""
        self._tokens(pool, "sent").inc(decision.prompt_tokens)
        self._tokens(pool, "expected").inc(decision.held_tokens)
        self._tokens(pool, "cached").inc(cached_tokens)
        self._errors(pool).observe((cached_tokens - decision.held_tokens) / decision.prompt_tokens)


class PoolMetrics(RoutingTrace, Collector):
    """Implements `engines.routing.Observer`: routing decisions, requests to backends, turns, and weight updates."""

    def __init__(self, registry: CollectorRegistry, views: Callable[[], Iterable[BackendView]]) -> None:
        super().__init__(registry)
        self._views = views
        labels = ["pool", "backend"]
        self._backends: dict[tuple[str, str], tuple[Mapping[RequestEnd, Counter], Histogram]] = {}
        """Kept because every request needs them and looking them up is expensive."""
        self._requests = Counter(
            "rollout_backend_requests_total",
            "Requests to an engine by how they ended: answered, failed, or cancelled by this service",
            [*labels, "outcome"],
            registry=None,
        )
        self._seconds = Histogram(
            "rollout_backend_seconds",
            "Time from a request to an engine to its answer",
            labels,
            buckets=REQUEST_SECONDS,
            registry=None,
        )
        self._turns = Histogram(
            "rollout_turn_seconds",
            "Time from the request for a turn to its answer, with waits for the pool and repetitions elsewhere",
            ["pool"],
            buckets=REQUEST_SECONDS,
            registry=None,
        )
        self._updates = Histogram(
            "rollout_weights_update_seconds",
            "Time to load new weights into all engines of a pool, by what became of it",
            ["pool", "outcome"],
            buckets=LOAD_SECONDS,
            registry=None,
        )
        self._turns_of = cache(self._turns.labels)  # every turn needs it
        registry.register(self)

    def ended(self, pool: str, backend_id: str, seconds: float, end: RequestEnd) -> None:
        requests, times = self._series(pool, backend_id)
        requests[end].inc()
        if end is RequestEnd.ANSWERED:
            times.observe(seconds)

    def answered(self, pool: str, seconds: float) -> None:
        self._turns_of(pool).observe(seconds)

    def loaded(self, outcome: PoolOutcome, seconds: float) -> None:
        self._updates.labels(outcome.pool, _update(outcome)).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        views = list(self._views())
        self._follow(views)
        labels = ["pool", "backend"]
        in_flight = {(view.pool, view.backend_id): view.in_flight for view in views}
        yield gauge("rollout_backend_in_flight", "Requests that an engine works on", labels, in_flight)
        for metric in (self._requests, self._seconds, self._turns, self._updates):
            yield from metric.collect()

    def _follow(self, views: Iterable[BackendView]) -> None:
        present = {(view.pool, view.backend_id) for view in views}
        for pool, backend in self._backends.keys() - present:
            gone = {"pool": pool, "backend": backend}
            del self._backends[pool, backend]
            self._requests.remove_by_labels(gone)
            self._seconds.remove_by_labels(gone)
        for pool, backend in present:
            self._series(pool, backend)
            self._turns_of(pool)
            for outcome in UPDATES:
                self._updates.labels(pool, outcome)

    def _series(self, pool: str, backend: str) -> tuple[Mapping[RequestEnd, Counter], Histogram]:
        if (found := self._backends.get((pool, backend))) is None:
            requests = {end: self._requests.labels(pool, backend, end) for end in RequestEnd}
            found = self._backends[pool, backend] = requests, self._seconds.labels(pool, backend)
        return found


def _update(outcome: PoolOutcome) -> str:
    if all(each.ok for each in outcome.outcomes):
        return "loaded"
    return "partly" if outcome.changed else "failed"
