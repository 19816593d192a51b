"""Metrics of judges.

Every call is counted once, by its outcome, which separates a judge that cannot be understood from one that cannot be
reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from rollout_service.judging.contract import Vote

_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CACHED: Final = "cached"
JUDGED: Final = "judged"


class JudgeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._judgments = counter(
            "rollout_judge_judgments_total",
            "Questions to judges: judged, cached, or the code of the error",
            ["rubric", "outcome"],
        )
        self._votes = counter(
            "rollout_judge_votes_total", "Calls of judges, by what became of them", ["rubric", "outcome"]
        )
        self._tokens = counter("rollout_judge_tokens_total", "Tokens of judges, by kind", ["rubric", "kind"])
        self._seconds = Histogram(
            "rollout_judge_seconds",
            "Time to a judgment that was not cached",
            ["rubric"],
            buckets=_SECONDS,
            registry=registry,
        )

    def count_judgment(self, rubric: str, outcome: str) -> None:
        self._judgments.labels(rubric, outcome).inc()

    def count_votes(self, rubric: str, votes: Sequence[Vote], seconds: float) -> None:
        self._seconds.labels(rubric).observe(seconds)
        for vote in votes:
            self._votes.labels(rubric, vote.outcome).inc()
        self._tokens.labels(rubric, "prompt").inc(sum(vote.prompt_tokens for vote in votes))
        self._tokens.labels(rubric, "sampled").inc(sum(vote.sampled_tokens for vote in votes))
