"""All attempts under way at this node.

Guarantee: an activity is on the board exactly as long as its attempt's block lasts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from api_schemas.tracing import TraceContext
from rollout_service.activity.record import Activity, StepObserver


class ActivityBoard:
    """The activities of one node."""

    def __init__(self) -> None:
        self._observers: tuple[StepObserver, ...] = ()
        self._active: dict[str, Activity] = {}

    def observe(self, observer: StepObserver) -> None:
        """Tell an observer of all attempts that begin from now on."""
        self._observers += (observer,)

    @contextmanager
    def working(
        self,
        rollout_id: str,
        *,
        attempt: int,
        environment: str,
        run_id: str | None = None,
        group: int | None = None,
        trace: TraceContext | None = None,
    ) -> Iterator[Activity]:
        """Put an attempt on the board within the block, as the current activity."""
        activity = Activity(
            rollout_id,
            attempt=attempt,
            environment=environment,
            run_id=run_id,
            group=group,
            trace=trace,
            observers=self._observers,
        )
        self._active[rollout_id] = activity
        for observer in self._observers:
            observer.began(activity)
        try:
            with activity.entered():
                yield activity
        finally:
            if self._active.get(rollout_id) is activity:
                del self._active[rollout_id]
            activity.finished = time.perf_counter()
            for observer in self._observers:
                observer.finished(activity)

    def find(self, rollout_id: str) -> Activity | None:
        """Return what a rollout under way at this node does."""
        return self._active.get(rollout_id)

    def all(self) -> list[Activity]:
        """Return all activities, the oldest first."""
        return list(self._active.values())
