"""Writes the events that the service itself causes, beside what they tell of.

Guarantees: announcing takes microseconds, never waits and never fails; events are written in the order of their
announcement, and none replaces another. A store that fails loses the events that it should have written then, and
nothing else; one that hangs, those that come when `MAX_WAITING` wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import structlog
from pydantic import JsonValue

from api_schemas.events import EventKind
from rollout_service.base.errors import StoreError
from rollout_service.store.contract import Store

log = structlog.get_logger(__name__)

MAX_WAITING = 1_024
CLOSE_SECONDS = 1.0

_Said = tuple[EventKind, str, dict[str, JsonValue]]


class Announcer:
    """Writes events in the background."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._said, self._waiting = anyio.create_memory_object_stream[_Said](MAX_WAITING)
        self.dropped = 0
        """Events that were not written, since the store failed, too many waited, or the service had ended."""

    def announce(self, kind: EventKind, subject: str, data: dict[str, JsonValue]) -> None:
        """Have an event written after those announced before."""
        try:
            self._said.send_nowait((kind, subject, data))
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self.dropped += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write events within the block, and what waits at its end, for `CLOSE_SECONDS` at most."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write)
            try:
                yield
            finally:
                self._said.close()
                tasks.cancel_scope.deadline = anyio.current_time() + CLOSE_SECONDS

    async def _write(self) -> None:
        lost = 0
        async with self._waiting:
            async for kind, subject, data in self._waiting:
                try:
                    await self._store.record(kind, subject, data)
                except StoreError:
                    lost += 1
                    self.dropped += 1
                    continue
                if lost:
                    log.warning("events could not be recorded while the store failed", events=lost)
                    lost = 0
