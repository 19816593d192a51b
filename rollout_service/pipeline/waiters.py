"""Waiting for a rollout to end, without asking the store again and again."""

from __future__ import annotations

from collections import defaultdict

import anyio


class Waiters:
    """Who waits for which rollout; nothing is kept of a rollout that nobody waits for."""

    def __init__(self) -> None:
        self._events: defaultdict[str, set[anyio.Event]] = defaultdict(set)

    def watch(self, rollout_id: str) -> anyio.Event:
        """An event that is set when the rollout ends from now on; give it back with `forget`."""
        event = anyio.Event()
        self._events[rollout_id].add(event)
        return event

    def forget(self, rollout_id: str, event: anyio.Event) -> None:
        """Stop watching; idempotent."""
        events = self._events.get(rollout_id, set())
        events.discard(event)
        if not events:
            self._events.pop(rollout_id, None)

    def finished(self, rollout_id: str) -> None:
        """Wake all who wait for this rollout."""
        for event in self._events.pop(rollout_id, set()):
            event.set()
