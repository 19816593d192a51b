"""How rollouts ended lately, and the figures of engines; memory is bounded, however many rollouts end."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from api_schemas.errors import ErrorInfo
from api_schemas.inference import BackendView
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.overview import BackendOverview
from api_schemas.views.summaries import ErrorGroup
from rollout_service.activity import Activity, OpenStep, StepObserver

WINDOW_SECONDS = 300
RATE_SECONDS = 30
MAX_FAILURES = 2_000
MAX_GROUPS = 20
SHOWN_ROLLOUTS = 5


class _FailedRollout(NamedTuple):
    at: datetime
    rollout_id: str
    environment: str
    error: ErrorInfo


@dataclass(slots=True)
class _EndedSecond:
    number: int
    counts: Counter[str] = field(default_factory=Counter)


class Outcomes:
    def __init__(self) -> None:
        self._seconds: deque[_EndedSecond] = deque(maxlen=WINDOW_SECONDS + 1)
        self._failures: deque[_FailedRollout] = deque(maxlen=MAX_FAILURES)
        self._began = datetime.now(UTC)
        """Moved back by outcomes from before the start."""

    def ended(self, rollout: Rollout) -> None:
        self.note(datetime.now(UTC), outcome_of(rollout))
        if rollout.state is RolloutState.FAILED:
            self.note_failure(datetime.now(UTC), rollout)

    def note(self, at: datetime, outcome: str) -> None:
        """Count an outcome; calls are in order of `at`, give or take a second."""
        number, self._began = int(at.timestamp()), min(self._began, at)
        if not self._seconds or self._seconds[-1].number < number:
            self._seconds.append(_EndedSecond(number))
        self._seconds[-1].counts[outcome] += 1

    def note_failure(self, at: datetime, rollout: Rollout) -> None:
        if rollout.error is not None:
            self._failures.append(_FailedRollout(at, rollout.rollout_id, rollout.task.environment, rollout.error))

    def counts(self, now: datetime) -> dict[str, int]:
        """Return how many ended within the window, by outcome."""
        return dict(self._within(now, WINDOW_SECONDS).most_common())

    def per_second(self, now: datetime) -> float:
        """Return the rate over the last `RATE_SECONDS`."""
        window = max(1.0, min(float(RATE_SECONDS), (now - self._began).total_seconds()))
        return round(self._within(now, RATE_SECONDS).total() / window, 3)

    def errors(self, now: datetime) -> list[ErrorGroup]:
        """Return the failures of the window in groups, the largest first."""
        groups: dict[tuple[str, ...], list[_FailedRollout]] = {}
        for one in self._recent(now):
            key = (one.error.code, one.error.boundary, one.error.stage or "", one.environment)
            groups.setdefault(key, []).append(one)
        largest = sorted(groups.values(), key=len, reverse=True)[:MAX_GROUPS]
        return [_group(failures) for failures in largest]

    def _recent(self, now: datetime) -> Iterator[_FailedRollout]:
        since = now - timedelta(seconds=WINDOW_SECONDS)
        for one in reversed(self._failures):
            if one.at < since:
                return
            yield one

    def _within(self, now: datetime, seconds: int) -> Counter[str]:
        since = now.timestamp() - seconds
        total: Counter[str] = Counter()
        for one in reversed(self._seconds):
            if one.number <= since:
                break
            total.update(one.counts)
        return total


def outcome_of(rollout: Rollout) -> str:
    """Return `completed`, `cancelled`, or the code of the rollout's error."""
    if rollout.state is RolloutState.FAILED and rollout.error is not None:
        return rollout.error.code
    return str(rollout.state)


def success_share(counts: dict[str, int]) -> float | None:
    total = sum(counts.values())
    return round(counts.get(RolloutState.COMPLETED, 0) / total, 4) if total else None


def _group(failures: list[_FailedRollout]) -> ErrorGroup:
    newest = failures[0]
    return ErrorGroup(
        code=newest.error.code,
        boundary=newest.error.boundary,
        stage=newest.error.stage,
        environment=newest.environment,
        count=len(failures),
        last_at=newest.at,
        message=newest.error.message,
        hint=newest.error.hint,
        rollouts=[one.rollout_id for one in failures[:SHOWN_ROLLOUTS]],
    )


BACKEND_SECONDS = 60
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


class BackendFigures(StepObserver):
    """Sums engines' steps by backend for the last minute; a request costs microseconds, memory is bounded."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: dict[str, deque[_EngineSecond]] = {}

    def closed(self, activity: Activity, step: OpenStep) -> None:  # noqa: ARG002 - all attempts are summed
        if step.kind is not StepKind.ENGINE or step.error is not None or step.ended is None:
            return
        now = self._second(step.name, int(step.ended))
        now.requests += 1
        now.prompt += step.detail.get("prompt_tokens", 0)
        now.cached += step.detail.get("cached_tokens") or 0
        now.tokens += step.detail.get("tokens", 0)
        if len(now.times) < TIMES_PER_SECOND:
            now.times.append(step.ended - step.started)

    def of(self, backend: BackendView) -> BackendOverview:
        now, name = self._clock(), backend.backend_id
        seconds = [one for one in self._seconds.get(name, ()) if one.number > now - BACKEND_SECONDS - 1]
        if not seconds:
            return BackendOverview(backend=backend)
        window = max(1.0, min(float(BACKEND_SECONDS), now - self._began))
        prompt = sum(one.prompt for one in seconds)
        return BackendOverview(
            backend=backend,
            requests_per_second=round(sum(one.requests for one in seconds) / window, 3),
            tokens_per_second=round(sum(one.tokens for one in seconds) / window, 3),
            cached_share=round(sum(one.cached for one in seconds) / prompt, 4) if prompt else None,
            p50_seconds=round(statistics.median(t for one in seconds for t in one.times), 6),
        )

    def _second(self, backend_id: str, number: int) -> _EngineSecond:
        seconds = self._seconds.get(backend_id)
        if seconds is None:
            since = number - BACKEND_SECONDS  # engines that are gone are forgotten when others come
            self._seconds = {name: kept for name, kept in self._seconds.items() if kept[-1].number >= since}
            seconds = self._seconds[backend_id] = deque(maxlen=BACKEND_SECONDS + 1)
        if not seconds or seconds[-1].number < number:
            seconds.append(_EngineSecond(number))
        return seconds[-1]
