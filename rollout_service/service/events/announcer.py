"""Writes the events that the service itself causes, beside what they tell of.

Guarantees: announcing takes microseconds, never waits and never fails; events are written in the order of their
announcement, and none replaces another. A store that fails loses the events that it should have written then, and
nothing else; one that hangs, those that come when `MAX_WAITING` wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import structlog
from pydantic import JsonValue

from api_schemas.events import EventKind
from rollout_service.errors import StoreError
from rollout_service.signals import ResettableEvent
from rollout_service.store.contract import Store

log = structlog.get_logger(__name__)

MAX_WAITING = 1_024
CLOSE_SECONDS = 1.0


class Announcer:
    """Writes events in the background."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[EventKind, str, dict[str, JsonValue]]] = deque()
        self._said = ResettableEvent()
        self.dropped = 0
        """Events that were not written, since the store failed or too many waited."""

    def announce(self, kind: EventKind, subject: str, data: dict[str, JsonValue]) -> None:
        """Have an event written after those announced before."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((kind, subject, data))
        self._said.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write events within the block, and what is left at its end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._write_waiting()

    async def _work(self) -> None:
        while True:
            await self._said.wait()
            self._said.clear()
            await self._write_waiting()

    async def _write_waiting(self) -> None:
        while self._waiting:
            kind, subject, data = self._waiting.popleft()
            try:
                await self._store.record(kind, subject, data)
            except StoreError as error:
                self.dropped += 1
                log.warning("an event could not be recorded", kind=kind, error=str(error), hint=error.hint)
