"""A clock for tests."""

from dataclasses import dataclass


@dataclass
class ManualClock:
    """A clock that only the test moves."""

    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now
