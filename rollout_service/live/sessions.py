"""The live sessions of one node, for their owners: opened, looked at, judged, ended and deleted.

A session survives a restart. One that is idle or too old is closed, and expired records are removed. `serving.resolver`
has the sessions as agents call them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from uuid import uuid4

import anyio.to_thread
import structlog

from api_schemas.rollouts.sessions import ClosedBecause, MarkReason, TurnKind
from api_schemas.sessions import (
    DeletedSessions,
    FeedbackAnswer,
    LiveSession,
    SessionFeedback,
    SessionPage,
    SessionRequest,
)
from rollout_service.base.errors import ConflictError, InvalidFieldError, NotFoundError, StoreError
from rollout_service.live.contract import NextStateRecord, SessionRecord, TurnMarkRecord, TurnRecord
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.live.recorder import RecordingParts
from rollout_service.live.register import DEFAULT_TENANT, SessionRegister, UserHashes, hash_of
from rollout_service.live.serving.engines import SessionEngines
from rollout_service.live.serving.resolver import KEY_PREFIX, ActiveSessions, SessionResolver
from rollout_service.live.serving.views import (
    decode_cursor,
    encode_cursor,
    show_counts,
    show_part,
    show_session,
    show_turn,
)
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveSettings

log = structlog.get_logger(__name__)

_KEY_BYTES = 32
_SHORTEST_LOOK, _LONGEST_LOOK = 0.05, 5.0
"""Seconds between two looks for expired sessions."""
PRUNE_SECONDS = 60.0


@dataclass(eq=False)
class LiveSessions:
    """Methods raise NotFoundError if there is no such session or turn."""

    settings: LiveSettings
    store: SqliteLiveStore
    users: UserHashes
    engines: SessionEngines
    recording: RecordingParts
    deletion: SessionDeletion
    choose_pool: Callable[[str, str], str]
    """Returns a new session's pool, from the pool that it asks for and its id."""
    abandoned_pools: Callable[[float], Mapping[str, str]] = lambda _: {}
    """Returns pools whose sessions go on in others, given the time."""
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._active = ActiveSessions()
        self._register = SessionRegister(self.settings, self.store, self.users, self.choose_pool, self.clock)
        self.served = SessionResolver(
            self.settings, self.store, self._register, self._active, self.engines, self.recording, self.clock
        )

    @property
    def open_sessions(self) -> int:
        return self._register.open_sessions

    async def start(self) -> None:
        await self._register.count_open()

    async def open(self, request: SessionRequest) -> tuple[LiveSession, str | None]:
        """Return the session with its key, or without if it was open before.

        Raises:
            ConflictError: A session with this id was opened otherwise.
            NoBackendError: The pool is not served.
            RateLimitedError: Too many sessions are open.
        """
        session_id = request.session_id or f"s-{uuid4().hex}"
        request = await self._without_secrets(request)
        if (known := await self.store.session(session_id)) is not None:
            return await self._reopened(known, request)
        self.engines.policies.check(request.pool)
        key = f"{KEY_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"
        user = self._register.user_of(request.user, request.tenant, session_id)
        record = await self._register.make(request, session_id, user, key_hash=hash_of(key))
        if not await self._register.add(record):  # another request has opened it just now
            return await self.open(request.model_copy(update={"session_id": session_id}))
        return await self.show(record), key

    async def _without_secrets(self, request: SessionRequest) -> SessionRequest:
        recording = self.recording
        metadata, found = await recording.detectors.redact(request.metadata)
        if not found:
            return request
        recording.metrics.redacted(found)
        return request.model_copy(update={"metadata": metadata})

    async def _reopened(self, known: SessionRecord, request: SessionRequest) -> tuple[LiveSession, None]:
        same = (
            known.explicit
            and known.tenant == request.tenant
            and known.user == self._register.user_of(request.user, request.tenant, known.session_id)
            and (known.group, known.continues) == (request.group, request.continues)
            and dict(known.metadata) == request.metadata
            and request.train in (None, known.train)
            and known.retention_seconds <= (request.retention_seconds or inf)
        )
        if not same:
            raise ConflictError(
                "a session with this id was opened with other fields", hint="Choose another `session_id`."
            )
        return await self.show(known), None

    async def get(self, session_id: str) -> LiveSession:
        session = await self.show(await self._register.known(session_id))
        stored = await self.store.turns(session_id)
        turns = await anyio.to_thread.run_sync(lambda: [show_turn(turn) for turn in stored])  # it hashes their texts
        parts = [show_part(part) for part in await self.store.parts(session_id=session_id)]
        return session.model_copy(update={"turns": turns, "handed_over": parts})

    async def show(self, record: SessionRecord) -> LiveSession:
        counts = show_counts(await self.store.counts(record.session_id))
        parts = await self.store.parts(session_id=record.session_id)
        return show_session(record, counts, len(parts))

    async def page(self, cursor: str | None = None, limit: int = 100, *, is_open: bool | None = None) -> SessionPage:
        """List sessions without their turns, the newest first.

        Raises:
            InvalidFieldError: The cursor is none of a page.
        """
        before = decode_cursor(cursor) if cursor is not None else None
        records = await self.store.sessions(before=before, limit=limit, is_open=is_open)
        return SessionPage(
            sessions=[await self.show(record) for record in records],
            next_cursor=None if len(records) < limit else encode_cursor(records[-1].opened_at, records[-1].session_id),
            counts=show_counts(await self.store.counts()),
        )

    async def end(self, session_id: str) -> LiveSession:
        """Cut off the answers under way. Idempotent."""
        await self._register.known(session_id)
        await self._close(session_id, ClosedBecause.EXPLICIT)
        return await self.get(session_id)

    async def _close(self, session_id: str, because: ClosedBecause) -> None:
        async with self._active.held(session_id):  # a request may be loading it, and would go on
            await self._close_held(session_id, because)

    async def _close_held(self, session_id: str, because: ClosedBecause) -> None:
        await self._register.close(session_id, because)
        await self._active.end(session_id)

    async def delete(
        self, *, session_id: str | None = None, user: str | None = None, tenant: str | None = None
    ) -> DeletedSessions:
        """Delete a session, or all of a user; name the parts that had left the service.

        `user` is the name with which sessions were opened, or the hash that they show.

        Raises:
            InvalidFieldError: Several tenants have a user of this name, and `tenant` is not given.
        """
        if session_id is not None:
            await self._register.known(session_id)
            await self._close(session_id, ClosedBecause.DELETED)
            return await self.deletion.delete(session_id=session_id)
        hashed = await self._hash_of(user or "", tenant)
        async for record in self.store.all_sessions(is_open=True, user=hashed):
            await self._close(record.session_id, ClosedBecause.DELETED)
        return await self.deletion.delete(user=hashed)

    async def _hash_of(self, user: str, tenant: str | None) -> str:
        """Hash the name of a user that has had sessions; any other text is taken for a hash."""
        configured = (DEFAULT_TENANT, *(key.tenant for key in self.settings.keys))
        tenants = [tenant] if tenant is not None else {*configured, *await self.store.tenants()}
        hashes = {each: self.users.hash(user, each) for each in sorted(tenants)}
        known = {each: hashed for each, hashed in hashes.items() if await self.store.sessions_of(hashed)}
        if len(known) > 1:
            message = f"is needed: users of this name are in the tenants {', '.join(known)}"
            raise InvalidFieldError.at("query.tenant", message)
        if not known and tenant is not None and not await self.store.sessions_of(user):
            return hashes[tenant]  # of whom all may be gone but what a run has
        return next(iter(known.values()), user)

    async def feedback(self, session_id: str, feedback: SessionFeedback) -> FeedbackAnswer:
        await self._register.known(session_id)
        async with self._active.held(session_id):  # of two at once, the first stays
            return await take_feedback(self.recording, session_id, feedback)

    async def expire(self) -> None:
        """Close idle and old sessions, move those of abandoned pools, and forget unused ones, until cancelled."""
        shortest = min(self.settings.idle_seconds, self.settings.max_age_seconds) / 4
        while True:
            await anyio.sleep(min(max(shortest, _SHORTEST_LOOK), _LONGEST_LOOK))
            with _trying_again():
                await self._expire()
                await self._move()
            self._active.forget_idle()

    async def _expire(self) -> None:
        settings, now = self.settings, self.clock()
        expired = await self.store.expired(now, settings.idle_seconds, settings.max_age_seconds)
        for session_id, because in expired:
            async with self._active.held(session_id) as gateway:
                if because is ClosedBecause.MAX_AGE or gateway is None or not gateway.is_busy:
                    await self._close_held(session_id, because)

    async def _move(self) -> None:
        """Let sessions go on in the pool that their own was a candidate for; answers under way are cut off."""
        for pool, other in self.abandoned_pools(self.clock()).items():
            for session_id in await self.store.move(pool, other):
                async with self._active.held(session_id):  # it may be being loaded
                    await self._active.end(session_id)

    async def prune(self) -> None:
        """Remove expired records until cancelled."""
        pause = min(max(self.settings.retention_seconds / 4, _SHORTEST_LOOK), PRUNE_SECONDS)
        while True:
            with _trying_again():
                # First, since pruning fails as long as another program reads the file.
                await self.store.forget_opt_outs(self.clock() - self.settings.opt_out_seconds)
                while await self.store.prune(self.clock(), self.settings.retention_bytes):
                    pass  # the store removes some at a time
            await anyio.sleep(pause)


@contextmanager
def _trying_again() -> Iterator[None]:
    """Bear with a failing store, since it may recover."""
    try:
        yield
    except StoreError as error:
        log.debug("live sessions cannot be looked after; trying again", error=str(error), hint=error.hint)


async def take_feedback(parts: RecordingParts, session_id: str, feedback: SessionFeedback) -> FeedbackAnswer:
    """Set a turn's value to its user's, which wins over the judge's, once; the same again changes nothing.

    Raises:
        NotFoundError: There is no such turn.
        ConflictError: The user said something else of it before.
    """
    turn = await _find(parts.store, session_id, feedback.turn)
    before = turn.mark
    is_revised = turn.part is not None or turn.dropped is not None
    answer = FeedbackAnswer(turn=turn.turn, value=feedback.value, revised=is_revised)
    if before is not None and before.reason is MarkReason.EXPLICIT:
        if before.value != feedback.value:
            raise ConflictError(
                f"turn {turn.turn} has feedback with another value",
                hint="Feedback that was given stays as it is.",
                context={"value": before.value},
            )
        return answer
    await _set(parts, turn, feedback)
    if before is not None and before.value is not None:
        parts.metrics.compared(judged=before.value, explicit=feedback.value)
    return answer


async def _find(store: SqliteLiveStore, session_id: str, number: int | None) -> TurnRecord:
    if number is not None:
        turn = await store.turn(session_id, number)
    else:
        turns = await store.turns(session_id)
        main = [each for each in turns if each.delivered and each.kind is TurnKind.MAIN]
        turn = main[-1] if main else None
    if turn is None:
        named = f"no turn {number}" if number is not None else "no main turn that was delivered"
        raise NotFoundError(f"the session has {named}", hint="GET /v1/sessions/{session_id} lists its recorded turns.")
    return turn


async def _set(parts: RecordingParts, turn: TurnRecord, feedback: SessionFeedback) -> None:
    now = parts.clock()
    if feedback.text and turn.next_state is None:
        if found := await parts.detectors.search([feedback.text]):
            parts.metrics.redacted(found)
        else:
            state = NextStateRecord(role="user", text=feedback.text, arrived_at=now)
            await parts.store.follow(turn.session_id, turn.turn, state)
    mark = TurnMarkRecord(value=feedback.value, reason=MarkReason.EXPLICIT, source="explicit", at=now)
    await parts.store.mark(turn.session_id, turn.turn, mark)
    parts.rated(turn.session_id, turn.turn)
    parts.metrics.judged(turn, mark)
