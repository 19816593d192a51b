"""Writes the events that the service itself causes, beside what they tell of.

Guarantees: announcing takes microseconds, never waits and never fails; a store that fails loses events of this kind and
nothing else. No storm: of the same kind and subject, one event a second at most is written, with what was said last.
"""

from __future__ import annotations

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

PERIOD_SECONDS = 1.0
MAX_WAITING = 1_024
CLOSE_SECONDS = 1.0


class Announcer:
    """Writes events in the background."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[tuple[EventKind, str], dict[str, JsonValue]] = {}
        self._written: dict[tuple[EventKind, str], float] = {}
        self._said = ResettableEvent()
        self.dropped = 0
        """Events that were not written, since the store failed or too many waited."""

    def announce(self, kind: EventKind, subject: str, data: dict[str, JsonValue]) -> None:
        """Have an event written; one of the same kind and subject that was not written yet is replaced."""
        key = (kind, subject)
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting[key] = data
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
            self._written.clear()
            await self._write_due()

    async def _work(self) -> None:
        while True:
            await self._said.wait()
            self._said.clear()
            await self._write_due()
            if self._waiting:  # each was written less than a second ago
                await anyio.sleep(PERIOD_SECONDS / 4)
                self._said.set()

    async def _write_due(self) -> None:
        now = anyio.current_time()
        self._written = {key: at for key, at in self._written.items() if now - at < PERIOD_SECONDS}
        for key in [key for key in self._waiting if key not in self._written]:
            kind, subject = key
            data = self._waiting.pop(key)
            self._written[key] = now
            try:
                await self._store.record(kind, subject, data)
            except StoreError as error:
                self.dropped += 1
                log.warning("an event could not be recorded", kind=kind, error=str(error), hint=error.hint)
