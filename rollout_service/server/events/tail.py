"""The newest events in memory, encoded, for all who follow them.

Guarantees: however many readers there are, an event is read from the store and encoded once. A reader that is far
behind reads from the store until it has caught up. Nothing is skipped, and nothing comes twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import anyio
from fastapi.sse import format_sse_event

from api_schemas.events import Event
from rollout_service.store.contract import Store

TAIL_EVENTS = 4_096
PAGE_EVENTS = 1_000


@dataclass(frozen=True, slots=True)
class SentEvent:
    """An event as it is sent."""

    event_id: int
    kind: str
    subject: str
    frame: bytes

    @classmethod
    def of(cls, event: Event) -> SentEvent:
        """Encode an event."""
        frame = format_sse_event(data_str=event.model_dump_json(), event=event.kind, id=str(event.event_id))
        return cls(event.event_id, event.kind, event.subject, frame)


class EventTail:
    """Reads events for several readers at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = anyio.Lock()
        self._events: deque[SentEvent] = deque()
        self._start = self._end = 0
        """It has the events after the first of these ids, up to the second."""

    async def after(self, seen: int, newest: int) -> list[SentEvent]:
        """Return events after the id `seen`, in order: at least one if `newest`, the newest id, is above it."""
        async with self._lock:
            if newest - self._end > PAGE_EVENTS:  # nobody has read for a while
                self._begin_after(newest - PAGE_EVENTS)
            if newest > self._end:
                self._add(await self._store.events(after=self._end, limit=PAGE_EVENTS))
        if seen < self._start:
            return [SentEvent.of(event) for event in await self._store.events(after=seen, limit=PAGE_EVENTS)]
        found: list[SentEvent] = []
        for event in reversed(self._events):
            if event.event_id <= seen:
                break
            found.append(event)
        return found[::-1]

    def rewind(self, newest: int) -> None:
        """Forget the events above `newest`, which the store has lost; other events will have their ids."""
        if newest < self._end:
            self._begin_after(newest)

    def _begin_after(self, event_id: int) -> None:
        self._events.clear()
        self._start = self._end = event_id

    def _add(self, events: list[Event]) -> None:
        self._events.extend(map(SentEvent.of, events))
        if events:
            self._end = events[-1].event_id
        while len(self._events) > TAIL_EVENTS:
            self._start = self._events.popleft().event_id
