"""Stops the clock of an agent's work while all that it waits for is in a queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rollout_service.episodes import WorkClock


class WaitingClock:
    """An agent's clock during a wave: it runs within the block while at least one of the wave is at work."""

    def __init__(self, clock: WorkClock) -> None:
        self._clock = clock
        self._at_work = 0

    def __enter__(self) -> Self:
        self._clock.stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.start(self._clock.seconds)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one of the wave as at work within the block."""
        if self._at_work == 0:
            self._clock.start(self._clock.seconds)
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            if self._at_work == 0:
                self._clock.stop()
