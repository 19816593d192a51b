"""The overview for many readers at once.

Guarantees: it is made at most once a second, and only while somebody asks; it is encoded once, whoever reads it. No
task runs in the background: the first reader whose second is over makes the next one, and the others get it from there.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from fastapi.sse import format_sse_event

from api_schemas.views.overview import Overview

PERIOD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One overview, as it is sent."""

    number: int
    """A number that grows with each."""
    overview: Overview
    event: bytes
    """It as a server-sent event."""


class OverviewFeed:
    """Makes overviews and shares them."""

    def __init__(
        self, build: Callable[[], Awaitable[Overview]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._build = build
        self._clock = clock
        self._lock = anyio.Lock()
        self._newest: Frame | None = None
        self._made_at = 0.0

    async def latest(self) -> Frame:
        """Return an overview that is at most a second old."""
        async with self._lock:
            if self._newest is None or self._clock() - self._made_at >= PERIOD_SECONDS:
                return await self._make()
            return self._newest

    async def after(self, number: int) -> Frame:
        """Return the next overview after the one with this number, a second after it at the earliest."""
        while self._newest is not None and self._newest.number <= number:
            await anyio.sleep(max(0.0, self._made_at + PERIOD_SECONDS - self._clock()))
            await self.latest()
        return await self.latest()

    async def _make(self) -> Frame:
        overview = await self._build()
        number = 1 if self._newest is None else self._newest.number + 1
        event = format_sse_event(data_str=overview.model_dump_json(), event="overview")
        self._newest = Frame(number, overview, event)
        self._made_at = self._clock()
        return self._newest
