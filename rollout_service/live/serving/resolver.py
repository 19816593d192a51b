"""The sessions that users' agents call, found by their keys, by their ids, or by a client's own ids.

A session goes on with exact ids after a restart. A key, or a client's own id under its key, reaches its own session and
no other; there is no default session. An ended session takes no requests.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from api_schemas.rollouts.sessions import ClosedBecause, TurnKind
from api_schemas.sessions import SessionRequest
from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.sessions.keys import unknown_key
from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.live.consent import ConversationConsent
from rollout_service.live.contract import SessionRecord
from rollout_service.live.recorder import RecordingParts, SessionRecorder
from rollout_service.live.register import RateLimitedError, SessionEndedError, SessionRegister, hash_of
from rollout_service.live.replay import LIVE, rebuild
from rollout_service.live.serving.engines import SessionEngines, Unrecorded
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveKey, LiveSettings

KEY_PREFIX = "sk-live-"
_MAX_ID = 256
_NUMBER = re.compile(r"~([0-9]{1,9})$")


@dataclass(eq=False)
class SessionResolver:
    settings: LiveSettings
    store: SqliteLiveStore
    register: SessionRegister
    active: ActiveSessions
    engines: SessionEngines
    recording: RecordingParts
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._rate = RequestRate(self.settings.requests_per_minute)
        self._keys = {hash_of(key.key.get_secret_value()): key for key in self.settings.keys}

    def knows(self, key: str) -> bool:
        """Accept keys that look like a session's, and those of clients with ids of their own."""
        return key.startswith(KEY_PREFIX) or hash_of(key) in self._keys

    async def serve_key(self, key: str, client_id: str) -> GatewaySession:
        """Return a session; `client_id` is the client's own id, which configured keys need.

        Raises:
            UnauthorizedError: No session has this key.
            SessionEndedError: The session has ended.
            RateLimitedError: Its user has sent too many requests, or too many sessions are open.
        """
        configured = self._keys.get(hash_of(key))
        if configured is not None:
            return await self._serve_client_id(configured, client_id)
        record = await self.store.session_of_key(hash_of(key)) if key.startswith(KEY_PREFIX) else None
        if record is None:
            raise unknown_key()
        return await self._serve(record)

    async def serve_id(self, session_id: str, key: str | None) -> GatewaySession:
        """Return a session; `key` must be its own, or None for a caller who may use all sessions.

        Raises:
            UnauthorizedError: The key is not the session's.
            NotFoundError: There is no such session.
            SessionEndedError: The session has ended.
            RateLimitedError: Its user has sent too many requests.
        """
        if key is None:
            return await self._serve(await self.register.known(session_id))
        record = await self.store.session(session_id)
        if record is None or not secrets.compare_digest(record.key_hash, hash_of(key)):
            raise unknown_key()
        return await self._serve(record)

    async def _serve_client_id(self, key: LiveKey, client_id: str) -> GatewaySession:
        if not client_id:
            user = self.register.user_of(key.user, key.tenant, self.register.client_of(key, ""))
            charge = partial(self._rate.take, user)
            charge()
            self.recording.metrics.unrecorded("no_session")
            return self.engines.open(key.pool, key.tenant, Unrecorded("no-session"), charge)
        if len(client_id) > _MAX_ID:
            message = f"must have at most {_MAX_ID} characters"
            raise InvalidFieldError.at("X-Session-Id", message)
        while True:
            record = await self._record_of_client(key, client_id)
            try:
                return await self._serve(record)
            except SessionEndedError:
                if record.closed_because is not None:
                    raise
                # It expired meanwhile, so the request goes to the client's next session.

    async def _record_of_client(self, key: LiveKey, client_id: str) -> SessionRecord:
        """Return the newest session; an expired one goes on as a new one."""
        client = self.register.client_of(key, client_id)
        latest = await self.store.latest_of_client(client)
        if latest is not None and latest.closed_because in (None, ClosedBecause.EXPLICIT):
            return latest
        return await self._open_client(key, client_id, client, latest)

    async def _open_client(
        self, key: LiveKey, client_id: str, client: str, latest: SessionRecord | None
    ) -> SessionRecord:
        """Open a session under the first free id."""
        self.engines.policies.check(key.pool)
        user = self.register.user_of(key.user, key.tenant, client)
        continues = None if latest is None else latest.session_id
        for number in count(1 if continues is None else _number_of(continues) + 1):
            session_id = _client_session_id(key.name, client_id, number)
            request = SessionRequest(
                session_id=session_id, pool=key.pool, tenant=key.tenant, train=key.train, continues=continues
            )
            record = await self.register.make(request, session_id, user, client=client)
            if await self.register.add(record):
                return record
            # The id is somebody else's, or another request of this client was faster.
            other = await self.store.latest_of_client(client)
            if other is not None and other.closed_at is None:
                return other
        raise AssertionError("numbers do not end")

    async def _serve(self, record: SessionRecord) -> GatewaySession:
        if record.closed_because is not None:
            raise SessionEndedError(record.closed_because)
        self._rate.take(record.user)
        session = await self.active.get(record.session_id, lambda: self._load(record))
        self.recording.later(partial(self.store.served, record.session_id, self.clock(), opted_out=False))
        return session

    async def _load(self, record: SessionRecord) -> GatewaySession:
        """Restore the conversations from stored turns."""
        record = await self.register.known(record.session_id)  # it may have ended meanwhile
        if record.closed_because is not None:
            raise SessionEndedError(record.closed_because)
        engines = self.engines
        turns = await self.store.turns(record.session_id)
        renderer = engines.renderer(record.pool)
        capture = TurnCapture(renderer, LIVE)
        if turns:
            capture = await anyio.to_thread.run_sync(rebuild, renderer, turns)
        default = TurnKind.MAIN if record.explicit else TurnKind(self.settings.turn_kind)
        consent = ConversationConsent(
            self.register.conversation_of(record),
            self.recording.hashes,
            await self.register.opt_outs_of(record.session_id),
            # The sessions of a client's own id are one conversation.
            partial(self.register.opt_outs_before, record) if record.continues and not record.client else None,
        )
        recorder = SessionRecorder(
            record,
            capture,
            self.recording,
            consent,
            default,
            sent={turn.turn for turn in turns if turn.delivered},
        )
        charge = partial(self._rate.take, record.user)
        return engines.open(record.pool, record.tenant, recorder, charge, session_id=record.session_id, capture=capture)


def _client_session_id(key_name: str, client_id: str, number: int) -> str:
    """Name the n-th session of a client's own id, for people: a hash of the id distinguishes clients."""
    session_id = f"{key_name}:{client_id}" + (f"~{number}" if number > 1 else "")
    if len(session_id) <= _MAX_ID:
        return session_id
    return f"{key_name}:{sha256(session_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _number_of(session_id: str) -> int:
    """Read the number from a name; 1 if it has none."""
    found = _NUMBER.search(session_id)
    return 1 if found is None else int(found[1])


MINUTE = 60.0


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


class RequestRate:
    """Limits the answers that each user may ask for; the limit refills evenly.

    Memory is bounded by the users of the last minute.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = per_minute
        self._clock = clock
        self._users: OrderedDict[str, _Allowance] = OrderedDict()

    def take(self, user: str, count: int = 1) -> None:
        """Count a request, or its further answers.

        Raises:
            RateLimitedError: The user has asked for too many.
        """
        if self._most is None:
            return
        now, per_second = self._clock(), self._most / MINUTE
        self._forget(now)
        allowance = self._users.get(user) or _Allowance(self._most, now)
        left = min(self._most, allowance.left + (now - allowance.at) * per_second)
        if left < count:
            raise RateLimitedError(
                f"this user may ask for {self._most} answers a minute",
                hint="Repeat the request later, or ask for fewer answers at once.",
                seconds=(count - left) / per_second,
            )
        self._users[user] = _Allowance(left - count, now)
        self._users.move_to_end(user)

    def _forget(self, now: float) -> None:
        while self._users and next(iter(self._users.values())).at <= now - MINUTE:
            self._users.popitem(last=False)


KEPT = 2_000
KEEP_SECONDS = 300.0
MIN_KEEP_SECONDS = 10.0
"""Long enough for a request to be read after its session was found."""


@dataclass(slots=True)
class _ActiveSession:
    gateway: GatewaySession
    used_at: float


class ActiveSessions:
    """The sessions in memory, those used longest ago first.

    A session is loaded once, however many requests wait for it. One that nobody has used for a while is forgotten, and
    memory has at most `KEPT` beside those that are being answered.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _ActiveSession] = OrderedDict()
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        """Each exists while someone waits for it."""

    @asynccontextmanager
    async def held(self, session_id: str) -> AsyncIterator[GatewaySession | None]:
        """Let no other request get the session; yield None if it is not in memory."""
        async with self._locks.setdefault(session_id, anyio.Lock()):
            session = self._sessions.get(session_id)
            yield None if session is None else session.gateway

    async def get(self, session_id: str, load: Callable[[], Awaitable[GatewaySession]]) -> GatewaySession:
        async with self._locks.setdefault(session_id, anyio.Lock()):
            session = self._sessions.get(session_id)
            gateway = await load() if session is None else session.gateway
            self._sessions[session_id] = _ActiveSession(gateway, time.monotonic())
            self._sessions.move_to_end(session_id)
        return gateway

    async def end(self, session_id: str) -> None:
        """Cut off the answers under way."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.gateway.end()

    def forget_idle(self) -> None:
        now, excess = time.monotonic(), len(self._sessions) - KEPT
        for number, (session_id, session) in enumerate(list(self._sessions.items())):
            keep_seconds = KEEP_SECONDS if number >= excess else MIN_KEEP_SECONDS
            if not session.gateway.is_busy and session.used_at <= now - keep_seconds:
                del self._sessions[session_id]
                session.gateway.close()
