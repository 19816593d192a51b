"""How long a run's rollouts take, and when a group should stop waiting for its last ones.

Guarantees: nothing is cut off before enough rollouts were seen. A rollout that is cut off enters the distribution as
"longer than any seen", so that cutting does not lower the quantile by which the next one is cut.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

_WINDOW = 1_024
_FEWEST = 32
"""Completions before a quantile means anything."""


class CompletionTimes:
    """The seconds that the latest rollouts of a run took."""

    def __init__(self, window: int = _WINDOW, fewest: int = _FEWEST) -> None:
        self._window = window
        self._fewest = fewest
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        """A rollout ended by itself."""
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._latest) > self._window:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def add_cut_off(self) -> None:
        """A rollout was cut off: all that is known of its time is that it is long."""
        self.add(math.inf)

    def quantile(self, share: float) -> float | None:
        """The time that this share of rollouts does not exceed; None while it is not known."""
        if len(self._sorted) < self._fewest:
            return None
        seconds = self._sorted[math.ceil(share * len(self._sorted)) - 1]
        return None if math.isinf(seconds) else seconds


@dataclass(frozen=True, slots=True)
class StragglerRule:
    """Cut off what has run longer than `factor` times the `quantile`, once `min_samples` of its group have ended."""

    quantile: float = 0.95
    factor: float = 1.5
    min_samples: int = 2

    def limit(self, times: CompletionTimes) -> float | None:
        """Seconds after which a rollout is a straggler; None while that is not known."""
        seconds = times.quantile(self.quantile)
        return None if seconds is None else self.factor * seconds
