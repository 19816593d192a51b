"""The figures of each engine over the last minute.

Guarantee: a request costs microseconds, and the memory is bounded, however many requests end in a second: sums are kept
for each second, with the times of the first requests of it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import Activity, OpenStep, StepObserver

WINDOW_SECONDS = 60
TIMES_PER_SECOND = 64
"""The most times of one second that the median is made of."""


@dataclass(slots=True)
class _EngineSecond:
    number: int
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine's last minute."""

    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    cached_share: float | None = None
    p50_seconds: float | None = None


class BackendFigures(StepObserver):
    """Sums the engines' steps of all attempts, by backend."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: dict[str, deque[_EngineSecond]] = {}

    def closed(self, activity: Activity, step: OpenStep) -> None:  # noqa: ARG002 - all attempts are summed
        """Note an engine's request that has ended; one that failed counts as none."""
        if step.kind is not StepKind.ENGINE or step.error is not None or step.ended is None:
            return
        now = self._second(step.name, int(step.ended))
        now.requests += 1
        now.prompt += step.detail.get("prompt_tokens", 0)
        now.cached += step.detail.get("cached_tokens") or 0
        now.tokens += step.detail.get("tokens", 0)
        if len(now.times) < TIMES_PER_SECOND:
            now.times.append(step.ended - step.started)

    def of(self, backend_id: str) -> EngineFigures:
        """Return a backend's figures over the last minute."""
        now = self._clock()
        seconds = [one for one in self._seconds.get(backend_id, ()) if one.number > now - WINDOW_SECONDS - 1]
        if not seconds:
            self._seconds.pop(backend_id, None)
            return EngineFigures()
        window = max(1.0, min(float(WINDOW_SECONDS), now - self._began))
        prompt = sum(one.prompt for one in seconds)
        return EngineFigures(
            requests_per_second=round(sum(one.requests for one in seconds) / window, 3),
            tokens_per_second=round(sum(one.tokens for one in seconds) / window, 3),
            cached_share=round(sum(one.cached for one in seconds) / prompt, 4) if prompt else None,
            p50_seconds=round(statistics.median(t for one in seconds for t in one.times), 6),
        )

    def _second(self, backend_id: str, number: int) -> _EngineSecond:
        seconds = self._seconds.get(backend_id)
        if seconds is None:
            seconds = self._seconds[backend_id] = deque(maxlen=WINDOW_SECONDS + 1)
        if not seconds or seconds[-1].number < number:
            seconds.append(_EngineSecond(number))
        return seconds[-1]
