"""Signals for those who wait in this service, from the events of all services.

Guarantees: a change is never missed, whichever service made it, and nobody is woken by a change that it has already
seen: the numbers of events say which came first. If Redis has lost events, everyone looks anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import anyio

from api_schemas.rollouts import RolloutState
from rollout_service.base.signals import ChangeSignal, KeyedEvents
from rollout_service.store.redis.reader import StreamEvent

_NEVER_SEEN = -1


class NewsSignal:
    """Whether there was an event of a kind after the last look."""

    def __init__(self) -> None:
        self._newest = 0
        self._seen = _NEVER_SEEN
        self.changed = ChangeSignal()
        """A signal of everything that may end a wait."""

    @property
    def is_news(self) -> bool:
        """Whether there was an event after the last look."""
        return self._newest > self._seen

    def happened(self, event_id: int) -> None:
        """Record an event."""
        self._newest = max(self._newest, event_id)
        self.changed.notify()

    def looked(self, event_id: int) -> None:
        """Record a look that saw everything up to an event."""
        self._seen = event_id

    def forget(self) -> None:
        """Let the next `wait` return at once."""
        self._newest, self._seen = 0, _NEVER_SEEN
        self.changed.notify()

    async def wait(self) -> None:
        """Wait for an event after the last look."""
        while not self.is_news:
            await self.changed.wait()


class RolloutSignals:
    """Wakes those who wait for work, cancellations and results."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds, for the time at which there may be work without any event."""
        self._clock = clock
        self._due = self._lease_seconds = math.inf
        self.work = NewsSignal()
        self.cancels = NewsSignal()
        self.results = KeyedEvents()

    def listen(self, events: Sequence[StreamEvent]) -> None:
        """Wake those whom these events concern; none at all means that some may be lost."""
        if not events:
            self._look_anew()
        for event in events:
            if event.kind == "rollout.cancel_requested":
                self.cancels.happened(event.event_id)
            elif event.kind in ("node.ready", "node.joined"):  # it may claim again; before, it got nothing
                self.work.happened(event.event_id)
            elif event.kind == "rollout.state":
                self._moved(event)

    def claimed(self, *, due_in: float, lease_seconds: float) -> None:
        """Record in how many seconds a claim found that there may be work, and how long its leases last."""
        self._due, self._lease_seconds = self._clock() + due_in, lease_seconds

    async def wait_for_work(self) -> None:
        """Wait until there may be work."""
        while not self.work.is_news and self._clock() < self._due:
            with anyio.move_on_after(self._due - self._clock()):
                await self.work.changed.wait()

    def _moved(self, event: StreamEvent) -> None:
        state = RolloutState(json.loads(event.data)["state"])
        if state is RolloutState.QUEUED:
            self.work.happened(event.event_id)
        elif state.terminal:
            self.results.set(event.subject)
        else:  # somebody works on it under a lease that the last claim may not have seen
            self._due = min(self._due, self._clock() + self._lease_seconds)
            self.work.changed.notify()

    def _look_anew(self) -> None:
        self.work.forget()
        self.cancels.forget()
        self.results.set_all()
