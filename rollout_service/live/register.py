"""The records of live sessions at one node, how many of them are open, and their users as hashes.

A session is refused while as many are open as the settings allow, also of before a restart.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from weakref import WeakValueDictionary

import anyio

from api_schemas.rollouts.sessions import ClosedBecause
from api_schemas.sessions import SessionRequest
from rollout_service.base.errors import ConfigurationError, NotFoundError, TryLaterError
from rollout_service.base.private_files import write_private
from rollout_service.gateway.errors import RolloutEndedError
from rollout_service.live.contract import OptOuts, SessionRecord
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveKey, LiveSettings

_SALT_BYTES = 32
_HASH_BYTES = 16
DEFAULT_TENANT = "default"


class UserHashes:
    """Users as salted hashes; users of two tenants are two users, whatever their names.

    The salt never leaves the node's state folder, and only its owner can read it.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    @classmethod
    def load(cls, path: Path) -> UserHashes:
        """Read the salt, or write a new one.

        Raises:
            ConfigurationError: The file cannot be read or written.
        """
        try:
            if not path.exists():
                write_private(path, secrets.token_bytes(_SALT_BYTES))
            salt = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"the salt of user names in {path} cannot be used: {error}") from error
        if len(salt) != _SALT_BYTES:
            raise ConfigurationError(
                f"{path} does not hold {_SALT_BYTES} bytes",
                hint="Restore it, or remove it; users of before are then others.",
            )
        return cls(salt)

    def message_key(self) -> bytes:
        return hashlib.blake2b(digest_size=_SALT_BYTES, key=self._salt, person=b"messages").digest()

    def of_conversation(self, session_id: str, client: str) -> str:
        """Hash a conversation, which goes on in all sessions of a client's own id."""
        return self._digest(b"conversation", client or session_id)

    def hash(self, user: str, tenant: str) -> str:
        return self._digest(b"user", json.dumps([tenant, user]))

    def of_session(self, session_id: str) -> str:
        """Make a hash for a session's unknown user."""
        return self._digest(b"session", session_id)

    def of_client(self, tenant: str, key_name: str, client_id: str) -> str:
        """Hash a client's own id, apart from those of other keys and tenants."""
        return self._digest(b"client", json.dumps([tenant, key_name, client_id]))

    def _digest(self, kind: bytes, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=_HASH_BYTES, key=self._salt, person=kind).hexdigest()


@dataclass(eq=False)
class SessionRegister:
    settings: LiveSettings
    store: SqliteLiveStore
    users: UserHashes
    choose_pool: Callable[[str, str], str]
    """Returns a new session's pool, from the pool that it asks for and its id."""
    clock: Callable[[], float]
    open_sessions: int = 0
    _opening: WeakValueDictionary[str, anyio.Lock] = field(default_factory=WeakValueDictionary)
    """Each exists while someone waits for it."""

    async def count_open(self) -> None:
        async for _ in self.store.all_sessions(is_open=True):
            self.open_sessions += 1

    def user_of(self, user: str | None, tenant: str, session_id: str) -> str:
        """Make a session without a user a user of its own."""
        users = self.users
        return users.hash(user, tenant) if user is not None else users.of_session(session_id)

    def client_of(self, key: LiveKey, client_id: str) -> str:
        return self.users.of_client(key.tenant, key.name, client_id)

    async def make(
        self, request: SessionRequest, session_id: str, user: str, *, key_hash: bytes = b"", client: str = ""
    ) -> SessionRecord:
        """Make a record without storing it; it has either a key or a client."""
        settings, now = self.settings, self.clock()
        quarantine = settings.quarantine_sessions
        return SessionRecord(
            session_id=session_id,
            key_hash=key_hash,
            pool=self.choose_pool(request.pool, session_id),
            user=user,
            tenant=request.tenant,
            train=settings.train if request.train is None else request.train,
            explicit=bool(key_hash),
            client=client,
            quarantined=quarantine > 0 and await self.store.sessions_of(user) < quarantine,
            retention_seconds=min(request.retention_seconds or settings.retention_seconds, settings.retention_seconds),
            continues=request.continues,
            group=request.group,
            metadata=request.metadata,
            opened_at=now,
            used_at=now,
        )

    async def add(self, record: SessionRecord) -> bool:
        """Return False if there is one with this id.

        Raises:
            RateLimitedError: Too many sessions are open.
        """
        # Another request may be opening the same session, which would be refused for its own place.
        async with self._opening.setdefault(record.session_id, anyio.Lock()):
            return await self._add(record)

    async def _add(self, record: SessionRecord) -> bool:
        if self.open_sessions >= self.settings.max_sessions:
            if await self.store.session(record.session_id) is not None:
                return False
            raise RateLimitedError(
                f"{self.settings.max_sessions} sessions are open",
                hint="End sessions, or raise `max_sessions` in `[live]`.",
                seconds=10.0,
            )
        self.open_sessions += 1  # before it is stored, since others may come meanwhile
        is_new = False
        try:
            if record.continues is not None:
                refused = await self.opt_outs_of(record.continues)
                if refused != OptOuts():
                    await self.store.opt_out(self.conversation_of(record), refused, self.clock())
            is_new = await self.store.open(record)
        finally:
            self.open_sessions -= not is_new
        return is_new

    def conversation_of(self, record: SessionRecord) -> str:
        """Return the name under which the store remembers the opt-outs."""
        return self.users.of_conversation(record.session_id, record.client)

    async def opt_outs_of(self, session_id: str) -> OptOuts:
        """Return the opt-outs, even if the session is gone."""
        record = await self.store.session(session_id)
        client = "" if record is None else record.client
        found = await self.store.opt_outs(self.users.of_conversation(session_id, client))
        # A session that is gone may have been a client's, or another node's. One that is there may have had such turns
        # so long ago that the store has forgotten what they were.
        is_incomplete = record is None or record.opted_out > 0
        return OptOuts(is_complete=False) if is_incomplete and found == OptOuts() else found

    async def opt_outs_before(self, record: SessionRecord) -> OptOuts:
        """Return the opt-outs so far of all sessions that this one continues."""
        found, seen = OptOuts(), {record.session_id}
        while record.continues is not None and not record.client and record.continues not in seen:
            seen.add(record.continues)
            before = await self.store.session(record.continues)
            conversation = self.users.of_conversation(record.continues, before.client if before else "")
            found = found.with_others(await self.store.opt_outs(conversation))
            if before is None:
                break
            record = before
        return found

    async def close(self, session_id: str, because: ClosedBecause) -> None:
        """Note that a session has ended; idempotent."""
        if await self.store.close_session(session_id, because, self.clock()):
            self.open_sessions -= 1

    async def known(self, session_id: str) -> SessionRecord:
        """Return the record of a session.

        Raises:
            NotFoundError: There is no such session.
        """
        record = await self.store.session(session_id)
        if record is None:
            raise NotFoundError("there is no such session", hint="GET /v1/sessions lists the sessions.")
        return record


def hash_of(key: str) -> bytes:
    """Hash a key; only its hash is stored."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


class SessionEndedError(RolloutEndedError):
    """The session has ended."""

    code = "session_ended"

    def __init__(self, because: str) -> None:
        super().__init__(
            f"this session has ended ({because})",
            hint="Open another one with POST /v1/sessions; its `continues` can name this one.",
        )


class PoolHeldError(TryLaterError):
    """The pool took no requests for longer than a session's request waits. Nothing was recorded."""

    code = "pool_held"


class RateLimitedError(TryLaterError):
    """There are too many requests of one user, or too many open sessions."""

    code = "rate_limited"
    status = HTTPStatus.TOO_MANY_REQUESTS
