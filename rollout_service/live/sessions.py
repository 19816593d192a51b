"""The live sessions of one node: opened, found by their keys, served, ended and deleted.

Guarantees: a session survives a restart and goes on with exact ids. A key, or a client's own id under its key, reaches
its own session and no other; there is no default session. An ended session takes no requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol
from uuid import uuid4

import anyio.to_thread
import structlog

from api_schemas.errors import FieldError
from api_schemas.rollouts.sessions import ClosedBecause, TurnKind
from api_schemas.sessions import (
    DeletedSessions,
    FeedbackAnswer,
    LiveSession,
    SessionFeedback,
    SessionPage,
    SessionRequest,
)
from rollout_service.errors import ConflictError, InvalidFieldError, NotFoundError, StoreError
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.sessions.keys import unknown_key
from rollout_service.gateway.sessions.session import GatewaySession
from rollout_service.live.contract import (
    LiveStore,
    SessionRecord,
)
from rollout_service.live.errors import RateLimitedError, SessionEndedError
from rollout_service.live.recorder import RecordingParts, SessionRecorder
from rollout_service.live.replay import LIVE, rebuild
from rollout_service.live.serving.active import ActiveSession, ActiveSessions
from rollout_service.live.serving.connecting import SessionEngines, Unrecorded
from rollout_service.live.serving.cursors import decode_cursor, encode_cursor
from rollout_service.live.serving.feedback import take_feedback
from rollout_service.live.serving.limits import RequestRate
from rollout_service.live.serving.users import UserHashes
from rollout_service.live.serving.views import show_counts, show_part, show_session, show_turn
from rollout_service.settings.live import LiveKey, LiveSettings

log = structlog.get_logger(__name__)

KEY_PREFIX = "sk-live-"
_KEY_BYTES = 32
_MAX_ID = 256
_PAGE = 1_000
_SHORTEST_LOOK, _LONGEST_LOOK = 0.05, 5.0
"""The bounds of the time between two looks for sessions that have expired, in seconds."""
PRUNE_SECONDS = 60.0


class Deletion(Protocol):
    """Deletes sessions with everything that was made of them."""

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> DeletedSessions:
        """Remove a session, or all of a user by its hash, and return what had left the service before."""
        ...


@dataclass(frozen=True, slots=True)
class LiveSessionParts:
    """What live sessions work with."""

    settings: LiveSettings
    store: LiveStore
    users: UserHashes
    engines: SessionEngines
    recording: RecordingParts
    deletion: Deletion
    choose_pool: Callable[[str, str], str]
    """Returns the pool that serves a new session, from the pool that it asks for and its id."""
    clock: Callable[[], float] = time.time


class LiveSessions:
    """The sessions of one node."""

    def __init__(self, parts: LiveSessionParts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._store = parts.store
        self._active = ActiveSessions()
        self._rate = RequestRate(parts.settings.requests_per_minute)
        self._keys = {_hash(key.key.get_secret_value()): key for key in parts.settings.keys}
        self._open = 0

    @property
    def open_sessions(self) -> int:
        """The number of open sessions."""
        return self._open

    @property
    def gateway_url(self) -> str:
        """The address of the gateway, which serves every session by its key."""
        return self._parts.engines.url

    async def start(self) -> None:
        """Count the sessions that are open since before the start."""
        before: tuple[float, str] | None = None
        while page := await self._store.sessions(before=before, limit=_PAGE, is_open=True):
            self._open += len(page)
            before = (page[-1].opened_at, page[-1].session_id)

    # -- for their owners ------------------------------------------------------

    async def open(self, request: SessionRequest) -> tuple[LiveSession, str | None]:
        """Open a session, and return it with its key; without the key if it was open before.

        Raises:
            ConflictError: A session with this id was opened otherwise.
            NoBackendError: The pool is not served.
            RateLimitedError: Too many sessions are open.
        """
        session_id = request.session_id or f"s-{uuid4().hex}"
        if (known := await self._store.session(session_id)) is not None:
            return await self._reopened(known, request)
        self._parts.engines.check(request.pool)
        key = f"{KEY_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"
        user = self._user(request.user, session_id)
        record = await self._new(request, session_id, user, key_hash=_hash(key))
        if not await self._store.open(record):  # another request has opened it just now
            return await self.open(request.model_copy(update={"session_id": session_id}))
        self._open += 1
        return await self.show(record), key

    async def _reopened(self, known: SessionRecord, request: SessionRequest) -> tuple[LiveSession, None]:
        same = (
            known.explicit
            and known.tenant == request.tenant
            and known.user == self._user(request.user, known.session_id)
            and (known.group, known.continues) == (request.group, request.continues)
            and dict(known.metadata) == request.metadata
        )
        if not same:
            raise ConflictError(
                "a session with this id was opened with other fields", hint="Choose another `session_id`."
            )
        return await self.show(known), None

    def _user(self, user: str | None, session_id: str) -> str:
        users = self._parts.users
        return users.hash(user) if user is not None else users.of_session(session_id)

    async def _new(
        self, request: SessionRequest, session_id: str, user: str, *, key_hash: bytes
    ) -> SessionRecord:
        settings, now = self._settings, self._parts.clock()
        if self._open >= settings.max_sessions:
            raise RateLimitedError(
                f"{settings.max_sessions} sessions are open",
                hint="End sessions, or raise `max_sessions` in `[live]`.",
                seconds=10.0,
            )
        quarantine = settings.quarantine_sessions
        return SessionRecord(
            session_id=session_id,
            key_hash=key_hash,
            pool=self._parts.choose_pool(request.pool, session_id),
            user=user,
            tenant=request.tenant,
            train=settings.train if request.train is None else request.train,
            explicit=bool(key_hash),
            quarantined=quarantine > 0 and await self._store.sessions_of(user) < quarantine,
            retention_seconds=min(
                request.retention_seconds or settings.retention_seconds, settings.retention_seconds
            ),
            continues=request.continues,
            group=request.group,
            metadata=request.metadata,
            opened_at=now,
            used_at=now,
        )

    async def get(self, session_id: str) -> LiveSession:
        """Return a session with its turns.

        Raises:
            NotFoundError: There is no such session.
        """
        session = await self.show(await self._known(session_id))
        turns = [show_turn(turn) for turn in await self._store.turns(session_id)]
        parts = [show_part(part) for part in await self._store.parts(session_id=session_id)]
        return session.model_copy(update={"turns": turns, "handed_over": parts})

    async def show(self, record: SessionRecord) -> LiveSession:
        """Return a session without its turns."""
        counts = show_counts(await self._store.counts(record.session_id))
        parts = await self._store.parts(session_id=record.session_id)
        return show_session(record, counts, len(parts))

    async def page(
        self, cursor: str | None = None, limit: int = 100, *, is_open: bool | None = None
    ) -> SessionPage:
        """Return sessions without their turns, the newest first.

        Raises:
            InvalidFieldError: The cursor is none of a page.
        """
        before = decode_cursor(cursor) if cursor is not None else None
        records = await self._store.sessions(before=before, limit=limit, is_open=is_open)
        is_last = len(records) < limit
        last = (records[-1].opened_at, records[-1].session_id) if records else None
        return SessionPage(
            sessions=[await self.show(record) for record in records],
            next_cursor=None if is_last or last is None else encode_cursor(last),
            counts=show_counts(await self._store.counts()),
        )

    async def end(self, session_id: str) -> LiveSession:
        """End a session; answers that are being sampled are cut off. Idempotent.

        Raises:
            NotFoundError: There is no such session.
        """
        await self._known(session_id)
        await self._close(session_id, ClosedBecause.EXPLICIT)
        return await self.get(session_id)

    async def _close(self, session_id: str, because: ClosedBecause) -> None:
        if await self._store.close_session(session_id, because, self._parts.clock()):
            self._open -= 1
        await self._active.end(session_id)

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> DeletedSessions:
        """Delete a session, or all of a user, and return what had left the service before.

        `user` is the name with which sessions were opened, or the hash that they show.

        Raises:
            NotFoundError: There is no such session.
        """
        if session_id is not None:
            await self._known(session_id)
            await self._close(session_id, ClosedBecause.DELETED)
            return await self._parts.deletion.delete(session_id=session_id)
        named = self._parts.users.hash(user or "")
        hashed = named if await self._store.sessions_of(named) else user or ""
        await self._close_all_of(hashed)
        return await self._parts.deletion.delete(user=hashed)

    async def _close_all_of(self, user: str) -> None:
        before: tuple[float, str] | None = None
        while page := await self._store.sessions(before=before, limit=_PAGE, is_open=True, user=user):
            before = (page[-1].opened_at, page[-1].session_id)
            for record in page:
                await self._close(record.session_id, ClosedBecause.DELETED)

    async def feedback(self, session_id: str, feedback: SessionFeedback) -> FeedbackAnswer:
        """Take what a user says of an answer; it wins over the judge.

        Raises:
            NotFoundError: There is no such session or turn.
            ConflictError: The user said something else of it before.
        """
        await self._known(session_id)
        return await take_feedback(self._parts.recording, session_id, feedback)

    async def _known(self, session_id: str) -> SessionRecord:
        record = await self._store.session(session_id)
        if record is None:
            raise NotFoundError("there is no such session", hint="GET /v1/sessions lists the sessions.")
        return record

    # -- for their agents ------------------------------------------------------

    def knows(self, key: str) -> bool:
        """Return whether a key looks like one of a session, or is configured for clients with ids of their own."""
        return key.startswith(KEY_PREFIX) or _hash(key) in self._keys

    async def serve_key(self, key: str, client_id: str) -> GatewaySession:
        """Return the session of a key; `client_id` is the client's own id for it, which configured keys need.

        Raises:
            UnauthorizedError: No session has this key.
            SessionEndedError: The session has ended.
            RateLimitedError: Its user has sent too many requests, or too many sessions are open.
        """
        configured = self._keys.get(_hash(key))
        if configured is not None:
            return await self._serve_client_id(configured, client_id)
        record = await self._store.session_of_key(_hash(key)) if key.startswith(KEY_PREFIX) else None
        if record is None:
            raise unknown_key()
        return await self._serve(record)

    async def serve_id(self, session_id: str, key: str | None) -> GatewaySession:
        """Return a session by its id; `key` must be its own, unless it is None for a caller who may use all sessions.

        Raises:
            UnauthorizedError: The key is not the session's.
            NotFoundError: There is no such session.
            SessionEndedError: The session has ended.
            RateLimitedError: Its user has sent too many requests.
        """
        if key is None:
            return await self._serve(await self._known(session_id))
        record = await self._store.session(session_id)
        if record is None or not secrets.compare_digest(record.key_hash, _hash(key)):
            raise unknown_key()
        return await self._serve(record)

    async def _serve_client_id(self, key: LiveKey, client_id: str) -> GatewaySession:
        if not client_id:
            self._rate.take(self._user(key.user, f"{key.name}:"))
            self._parts.recording.metrics.unrecorded("no_session")
            return self._parts.engines.open_unrecorded(key.pool, key.tenant, Unrecorded("no-session"))
        if len(client_id) > _MAX_ID:
            message = f"must have at most {_MAX_ID} characters"
            raise InvalidFieldError([FieldError(path="X-Session-Id", message=message)])
        return await self._serve(await self._record_of_client(key, client_id))

    async def _record_of_client(self, key: LiveKey, client_id: str) -> SessionRecord:
        """Return the open session of a client's id; one that has expired goes on as a new one."""
        continues: str | None = None
        number = 1
        while True:
            session_id = _client_session_id(key.name, client_id, number)
            record = await self._store.session(session_id)
            if record is None:
                record = await self._open_client(key, session_id, continues)
            if record.closed_at is None or record.closed_because is ClosedBecause.EXPLICIT:
                return record
            continues, number = session_id, number + 1

    async def _open_client(self, key: LiveKey, session_id: str, continues: str | None) -> SessionRecord:
        self._parts.engines.check(key.pool)
        request = SessionRequest(
            session_id=session_id, pool=key.pool, tenant=key.tenant, train=key.train, continues=continues
        )
        record = await self._new(request, session_id, self._user(key.user, session_id), key_hash=b"")
        if await self._store.open(record):
            self._open += 1
        return await self._known(session_id)

    async def _serve(self, record: SessionRecord) -> GatewaySession:
        if record.closed_because is not None:
            raise SessionEndedError(record.closed_because)
        self._rate.take(record.user)
        session = await self._active.get(record.session_id, lambda: self._load(record))
        store, now = self._store, self._parts.clock()
        self._parts.recording.later(lambda: store.use(record.session_id, now))
        return session.gateway

    async def _load(self, record: SessionRecord) -> ActiveSession:
        """Return a session with what its stored turns say of its conversations."""
        record = await self._known(record.session_id)  # it may have ended meanwhile
        if record.closed_because is not None:
            raise SessionEndedError(record.closed_because)
        engines = self._parts.engines
        turns = await self._store.turns(record.session_id)
        renderer = engines.renderer(record.pool)
        capture = TurnCapture(renderer, LIVE)
        if turns:
            capture = await anyio.to_thread.run_sync(rebuild, renderer, turns)
        default = TurnKind.MAIN if record.explicit else TurnKind(self._settings.turn_kind)
        recorder = SessionRecorder(
            record,
            capture,
            self._parts.recording,
            default,
            has_opted_out=record.opted_out > 0,
            sent={turn.turn for turn in turns if turn.delivered},
        )
        return ActiveSession(record, engines.open(record, capture, recorder), recorder)

    # -- in the background -----------------------------------------------------

    async def expire(self) -> None:
        """Close sessions that are idle or old, and forget those that nobody uses; runs until it is cancelled."""
        shortest = min(self._settings.idle_seconds, self._settings.max_age_seconds) / 4
        while True:
            await anyio.sleep(min(max(shortest, _SHORTEST_LOOK), _LONGEST_LOOK))
            with _trying_again():
                await self._expire()
            self._active.forget_idle()

    async def _expire(self) -> None:
        settings, now = self._settings, self._parts.clock()
        expired = await self._store.expired(now, settings.idle_seconds, settings.max_age_seconds)
        for session_id, because in expired:
            active = self._active.find(session_id)
            if because is ClosedBecause.MAX_AGE or active is None or not active.gateway.is_busy:
                await self._close(session_id, because)

    async def prune(self) -> None:
        """Remove what need not be kept any longer; runs until it is cancelled."""
        pause = min(max(self._settings.retention_seconds / 4, _SHORTEST_LOOK), PRUNE_SECONDS)
        while True:
            with _trying_again():
                while await self._store.prune(self._parts.clock(), self._settings.retention_bytes):
                    pass  # the store removes some at a time
            await anyio.sleep(pause)


@contextmanager
def _trying_again() -> Iterator[None]:
    """Log a store that fails, since the next time it may not."""
    try:
        yield
    except StoreError as error:
        log.error("live sessions cannot be looked after", error=str(error), hint=error.hint)


def _client_session_id(key_name: str, client_id: str, number: int) -> str:
    """Return the id of the n-th session of a client's own id; the same for the same key, and no other key's."""
    session_id = f"{key_name}:{client_id}" + (f"~{number}" if number > 1 else "")
    if len(session_id) <= _MAX_ID:
        return session_id
    return f"{key_name}:{sha256(session_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
