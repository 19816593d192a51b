"""Routing decisions: always counted, and logged in full at debug level."""

from __future__ import annotations

import logging
from functools import cache

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from rollout_service.engines.routing import Decision

log = structlog.get_logger(__name__)
_PARTS = ("backend_id", "held_tokens", "wait", "prefill", "move", "contention", "total")
_SHARES = (-1.0, -0.5, -0.2, -0.1, -0.05, -0.01, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


class RoutingTrace:
    """Implements `engines.routing.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._logger = logging.getLogger(__name__)
        # Cached because every turn looks each of them up, which is expensive.
        self._decisions = cache(
            Counter(
                "rollout_routing_decisions_total",
                "Backends chosen for a request, by the reason",
                ["pool", "reason"],
                registry=registry,
            ).labels
        )
        self._tokens = cache(
            Counter(
                "rollout_routing_prompt_tokens_total",
                "Prompt tokens: sent, expected in a backend's cache, and found there (cached)",
                ["pool", "kind"],
                registry=registry,
            ).labels
        )
        self._errors = cache(
            Histogram(
                "rollout_routing_prediction_error",
                "Cached minus expected tokens, as a share of the prompt",
                ["pool"],
                buckets=_SHARES,
                registry=registry,
            ).labels
        )

    def decided(self, pool: str, decision: Decision) -> None:
        """Record the backend chosen for a request."""
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
