"""The sessions that are being served by this process: their gateway sessions, by id.

Guarantees: a session is opened, or captured again from its stored turns, once however many requests wait for it. One
that nobody has used for a while is forgotten, and memory has at most `KEPT` beside those that are being answered.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import anyio

from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.live.contract import SessionRecord
from rollout_service.live.recorder import SessionRecorder

KEPT = 2_000
KEEP_SECONDS = 300.0
MIN_KEEP_SECONDS = 10.0
"""Long enough for a request to be read after its session was found."""


@dataclass(slots=True)
class ActiveSession:
    """A session that is being served."""

    record: SessionRecord
    gateway: GatewaySession
    recorder: SessionRecorder
    used_at: float = field(default_factory=time.monotonic)


class _Turnstile:
    """A lock that exists while someone waits for it."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = anyio.Lock()


class ActiveSessions:
    """The sessions in memory, those used longest ago first."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, ActiveSession] = OrderedDict()
        self._turnstiles: WeakValueDictionary[str, _Turnstile] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._sessions)

    async def get(self, session_id: str, load: Callable[[], Awaitable[ActiveSession]]) -> ActiveSession:
        """Return a session, which is loaded unless it is in memory."""
        turnstile = self._turnstiles.get(session_id)
        if turnstile is None:
            self._turnstiles[session_id] = turnstile = _Turnstile()
        async with turnstile.lock:
            session = self._sessions.get(session_id)
            if session is None:
                session = await load()
                self._sessions[session_id] = session
        session.used_at = time.monotonic()
        self._sessions.move_to_end(session_id)
        return session

    def find(self, session_id: str) -> ActiveSession | None:
        """Return a session, if it is in memory."""
        return self._sessions.get(session_id)

    async def end(self, session_id: str) -> None:
        """Cut off the answers under way in a session, and forget it."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.gateway.end()

    def forget_idle(self) -> None:
        """Forget sessions that nobody has used for a while."""
        now, excess = time.monotonic(), len(self._sessions) - KEPT
        for number, (session_id, session) in enumerate(list(self._sessions.items())):
            keep_seconds = KEEP_SECONDS if number >= excess else MIN_KEEP_SECONDS
            if not session.gateway.is_busy and session.used_at <= now - keep_seconds:
                del self._sessions[session_id]
                session.gateway.close()
