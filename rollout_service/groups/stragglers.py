"""How long a run's rollouts take, and when a group should stop waiting for its slowest ones.

Guarantees: nothing is cut off before enough rollouts have ended. A rollout that is cut off enters the distribution as
longer than any other, so cutting off does not lower the quantile that decides about the next one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

_WINDOW = 1_024
_FEWEST = 32
"""The number of completions from which on a quantile is meaningful."""


class CompletionTimes:
    """The durations in seconds of a run's latest rollouts."""

    def __init__(self, window: int = _WINDOW, fewest: int = _FEWEST) -> None:
        self._window = window
        self._fewest = fewest
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        """Add the duration of a rollout that ended by itself."""
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._latest) > self._window:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def add_cut_off(self) -> None:
        """Add a rollout that was cut off, of which only a lower bound is known."""
        self.add(math.inf)

    def quantile(self, share: float) -> float | None:
        """Return the duration that this share of rollouts does not exceed; None while it is unknown."""
        if len(self._sorted) < self._fewest:
            return None
        seconds = self._sorted[math.ceil(share * len(self._sorted)) - 1]
        return None if math.isinf(seconds) else seconds


@dataclass(frozen=True, slots=True)
class StragglerRule:
    """The rule to cut off rollouts: longer than `factor` times the `quantile`, with `min_samples` of a group ended."""

    quantile: float = 0.95
    factor: float = 1.5
    min_samples: int = 2

    def limit(self, times: CompletionTimes) -> float | None:
        """Return the seconds after which a rollout is a straggler; None while that is unknown."""
        seconds = times.quantile(self.quantile)
        return None if seconds is None else self.factor * seconds
