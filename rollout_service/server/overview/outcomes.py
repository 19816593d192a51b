"""How rollouts ended here within the last five minutes, and why those that failed did.

Guarantee: memory is bounded, however many rollouts end: counts for each second, and the newest failures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.views.summaries import ErrorGroup

WINDOW_SECONDS = 300
RATE_SECONDS = 30
"""The time that the rate of finished rollouts is taken over."""
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
    """Counts the rollouts that end."""

    def __init__(self) -> None:
        self._seconds: deque[_EndedSecond] = deque(maxlen=WINDOW_SECONDS + 1)
        self._failures: deque[_FailedRollout] = deque(maxlen=MAX_FAILURES)
        self._began = datetime.now(UTC)

    def ended(self, rollout: Rollout) -> None:
        """Note a rollout that has ended now."""
        self.note(datetime.now(UTC), outcome_of(rollout))
        if rollout.state is RolloutState.FAILED:
            self.note_failure(datetime.now(UTC), rollout)

    def note(self, at: datetime, outcome: str) -> None:
        """Count an outcome; later ones are not before it by more than a second."""
        number = int(at.timestamp())
        if not self._seconds or self._seconds[-1].number < number:
            self._seconds.append(_EndedSecond(number))
        self._seconds[-1].counts[outcome] += 1

    def note_failure(self, at: datetime, rollout: Rollout) -> None:
        """Keep why a rollout failed."""
        if rollout.error is not None:
            self._failures.append(
                _FailedRollout(at, rollout.rollout_id, rollout.task.environment, rollout.error)
            )

    def counts(self, now: datetime) -> dict[str, int]:
        """Return how many ended within the last five minutes, by outcome."""
        return dict(self._within(now, WINDOW_SECONDS).most_common())

    def per_second(self, now: datetime) -> float:
        """Return how many ended in a second, over the last 30 seconds."""
        window = max(1.0, min(float(RATE_SECONDS), (now - self._began).total_seconds()))
        return round(self._within(now, RATE_SECONDS).total() / window, 3)

    def errors(self, now: datetime) -> list[ErrorGroup]:
        """Return the failures of the last five minutes in groups, the largest first."""
        groups: dict[tuple[str, ...], list[_FailedRollout]] = {}
        for one in self._recent(now):
            key = (one.error.code, one.error.boundary, one.error.stage or "", one.environment)
            groups.setdefault(key, []).append(one)
        largest = sorted(groups.values(), key=len, reverse=True)[:MAX_GROUPS]
        return [_group(failures) for failures in largest]

    def _recent(self, now: datetime) -> Iterator[_FailedRollout]:
        """Yield the failures of the window, the newest first."""
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
    """Return how a rollout ended: `completed`, `cancelled`, or the code of its error."""
    if rollout.state is RolloutState.FAILED and rollout.error is not None:
        return rollout.error.code
    return str(rollout.state)


def success_share(counts: dict[str, int]) -> float | None:
    """Return the share of rollouts that completed; None if none ended."""
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
