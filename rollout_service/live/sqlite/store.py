"""The store of live sessions in one SQLite file: `async with SqliteLiveStore(path) as store:`.

Guarantees: a write whose method has returned is on the disk, or in the operating system's hands; a turn is in at most
one part, and a part in at most one rollout; deleting leaves no byte of a session in the store's files. Only one process
at a time can have the file open, only its owner can read it, and writes that wait at the same time share one
transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from api_schemas.rollouts.sessions import ClosedBecause, MaskReason
from api_schemas.sessions import FeedbackByVersion
from rollout_service.base.errors import StoreError
from rollout_service.live.contract import (
    DIGEST_BYTES,
    Deleted,
    NextStateRecord,
    OptOuts,
    PartRecord,
    PendingTurn,
    SessionRecord,
    TurnMarkRecord,
    TurnRecord,
)
from rollout_service.live.sqlite import (
    part_statements,
    removal_statements,
    session_statements,
    turn_statements,
    value_statements,
)
from rollout_service.live.sqlite.schema import LIVE
from rollout_service.store.sqlite.schema import Disk
from rollout_service.store.sqlite.thread import DatabaseThread

T = TypeVar("T")


class SqliteLiveStore:
    """The durable sessions of one node; the path `:memory:` is for tests.

    Raises:
        StoreError: On entering, if another process has the file open, or it is damaged, or cannot be created. Every
            method can raise it.
    """

    def __init__(self, path: Path | str, disk: Disk = "local") -> None:
        self._path = path
        self._schema = LIVE.on_disk(disk)
        self._thread: DatabaseThread

    async def __aenter__(self) -> Self:
        self._thread = DatabaseThread(self._path, lambda _: None, self._schema)
        await self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread.close()

    async def failed(self) -> None:
        """Wait until the store fails for good, which only a defect can cause.

        Raises:
            StoreError: The store has failed.
        """
        await self._thread.failed()

    @property
    def problem(self) -> StoreError | None:
        """Why the store cannot be written to at the moment; None if no reason is known."""
        return self._thread.problem

    def size_bytes(self) -> int:
        """Return the size of the file with its log; 0 in memory."""
        return self._thread.size_bytes()

    # -- sessions --

    async def open(self, session: SessionRecord) -> bool:
        """Keep a new session; return False, and change nothing, if its id is known."""
        return await self._write(lambda db: session_statements.open_session(db, session))

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self._read(lambda db: session_statements.get(db, session_id))

    async def session_of_key(self, key_hash: bytes) -> SessionRecord | None:
        return await self._read(lambda db: session_statements.of_key(db, key_hash))

    async def latest_of_client(self, client: str) -> SessionRecord | None:
        """Return the newest session of a client's own id, by its hash."""
        return await self._read(lambda db: session_statements.latest_of_client(db, client))

    async def sessions(
        self,
        *,
        before: tuple[float, str] | None = None,
        limit: int = 100,
        is_open: bool | None = None,
        user: str | None = None,
    ) -> Sequence[SessionRecord]:
        """Return sessions, the newest first, that were opened before this time and id; `user` is a hash."""
        return await self._read(lambda db: session_statements.page(db, before, limit, is_open, user))

    async def group(self, tenant: str, name: str) -> Sequence[SessionRecord]:
        """Return a tenant's sessions that work on the same task, the oldest first."""
        return await self._read(lambda db: session_statements.group(db, tenant, name))

    async def sessions_of(self, user: str) -> int:
        """Return how many sessions a user has had, deleted ones not counted."""
        return await self._read(lambda db: session_statements.had(db, user))

    async def tenants(self) -> Sequence[str]:
        """Return the tenants that have sessions."""
        return await self._read(session_statements.tenants)

    async def served(self, session_id: str, at: float, *, opted_out: bool) -> None:
        """Note that a turn was served. One that is opted out is counted here, and leaves nothing else; others are
        counted when they are recorded.
        """
        await self._write(lambda db: session_statements.served(db, session_id, at, opted_out=opted_out))

    async def opt_out(self, conversation: str, added: OptOuts, at: float) -> None:
        """Remember further opt-outs of a conversation. Of too much, some is kept, and noted as incomplete."""
        await self._write(lambda db: opt_out(db, conversation, added, at))

    async def opt_outs(self, conversation: str) -> OptOuts:
        """Return the opt-outs of a conversation, also once its sessions are gone."""
        return await self._read(lambda db: opt_outs(db, conversation))

    async def forget_opt_outs(self, before: float) -> None:
        """Forget the opt-outs of conversations that had none since a time."""
        await self._write(lambda db: forget_opt_outs(db, before))

    async def use(self, session_id: str, at: float) -> None:
        """Note that a request arrived."""
        await self._write(lambda db: session_statements.served(db, session_id, at, opted_out=False))

    async def close_session(self, session_id: str, because: ClosedBecause, at: float) -> bool:
        """Close a session; return False if it was closed before."""
        return await self._write(lambda db: session_statements.close(db, session_id, because, at))

    async def expired(self, now: float, idle: float, age: float) -> Sequence[tuple[str, ClosedBecause]]:
        """Return the open sessions whose last request, or whose opening, is longer ago than allowed."""
        return await self._read(lambda db: session_statements.expired(db, now, idle, age))

    # -- turns --

    async def record(self, turn: TurnRecord) -> None:
        """Keep a turn. One with the same id changes nothing."""
        await self._write(lambda db: turn_statements.record(db, turn))

    async def deliver(self, session_id: str, turn: int) -> None:
        """Note that the client got the turn's last token."""
        await self._write(lambda db: turn_statements.deliver(db, session_id, turn))

    async def mask(self, session_id: str, turn: int, because: MaskReason) -> None:
        """Note that a turn can never be trained on; the first reason stays."""
        await self._write(lambda db: turn_statements.mask(db, session_id, turn, because))

    async def follow(self, session_id: str, turn: int, state: NextStateRecord) -> bool:
        """Set a turn's next state; return False if it has one, which stays."""
        return await self._write(lambda db: turn_statements.follow(db, session_id, turn, state))

    async def mark(self, session_id: str, turn: int, mark: TurnMarkRecord) -> bool:
        """Set a turn's value unless it has one that wins: explicit ones win over all, and the first of others stays.

        Return whether it was set. A turn that a part has taken keeps its value; the new one is kept as a revision.
        """
        return await self._write(lambda db: turn_statements.mark(db, session_id, turn, mark))

    async def turns(self, session_id: str, first: int = 0) -> Sequence[TurnRecord]:
        """Return the turns of a session from this one on, by their ids."""
        return await self._read(lambda db: turn_statements.turns(db, session_id, first))

    async def turn(self, session_id: str, turn: int) -> TurnRecord | None:
        return await self._read(lambda db: turn_statements.get(db, session_id, turn))

    async def to_judge(self, limit: int) -> Sequence[TurnRecord]:
        """Return turns that may be judged and are not, the longest waiting first.

        They are main turns that were delivered, have a next state, and neither a mask, a mark nor a part.
        """
        return await self._read(lambda db: turn_statements.to_judge(db, limit))

    # -- parts --

    async def undecided(self, limit: int) -> Sequence[SessionRecord]:
        """Return sessions with a turn that is in no part, those first that were looked at longest ago."""
        return await self._write(lambda db: session_statements.undecided(db, limit))

    async def fates(self, session_ids: Sequence[str]) -> Mapping[str, Sequence[PendingTurn]]:
        """Return the turns of each session that are in no part, by their ids."""
        return await self._read(lambda db: part_statements.fates(db, session_ids))

    async def take_part(
        self,
        session_id: str,
        run_id: str | None,
        usable: Sequence[int],
        dropped: Mapping[int, MaskReason],
        at: float,
    ) -> PartRecord | None:
        """Put turns into a part, all of them or, if one is in a part, none.

        Without usable turns there is no part: the dropped ones are decided, and None is returned.
        """
        if usable and run_id is None:
            raise ValueError("a part with usable turns needs a run")
        return await self._write(lambda db: part_statements.take(db, session_id, run_id, usable, dropped, at))

    async def parts(
        self, run_id: str | None = None, *, unsubmitted: bool = False, session_id: str | None = None
    ) -> Sequence[PartRecord]:
        """Return parts, the oldest first."""
        return await self._read(
            lambda db: part_statements.parts(db, run_id, session_id, unsubmitted=unsubmitted)
        )

    async def give_back_part(self, session_id: str, part: int) -> bool:
        """Undo a part that has no offset, so that its turns can go into another; return False if it has one."""
        return await self._write(lambda db: part_statements.give_back(db, session_id, part))

    async def set_offset(self, session_id: str, part: int, offset: int | None) -> None:
        """Keep the number of the part's task in its run before it is appended there."""
        await self._write(lambda db: part_statements.set_offset(db, session_id, part, offset))

    async def claim(self, parts: Sequence[tuple[str, int]], rollout_id: str) -> PartRecord | None:
        """Give a rollout the first of these parts that is free or its own already; None if there is none."""
        return await self._write(lambda db: part_statements.claim(db, parts, rollout_id))

    # -- the end --

    async def counts(self, session_id: str | None = None) -> Mapping[str, int]:
        """Return the numbers of turns: `served`, `recorded`, `judged`, `delivered`, `waiting`, `dropped:<reason>`.

        Without an id they are over all sessions, removed ones included.
        """

        def count(db: sqlite3.Connection) -> Mapping[str, int]:
            if session_id is None:
                return removal_statements.counts(db)
            session = session_statements.find(db, session_id)
            return {} if session is None else removal_statements.counts(db, session["seq"])

        return await self._read(count)

    async def feedback(self) -> Sequence[FeedbackByVersion]:
        """Return the values of turns by their session's pool and by their version, removed ones included."""
        return await self._read(value_statements.figures)

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> Deleted:
        """Remove a session, or all of a user, so that no byte of them stays in the store's files; counts stay."""
        if (session_id is None) == (user is None):
            raise ValueError("name a session or a user")
        deleted = await self._write(
            lambda db: removal_statements.delete(db, session_id=session_id, user=user)
        )
        await self._thread.truncate_log()
        return deleted

    async def prune(self, now: float, bytes_per_user: int | None) -> int:
        """Remove closed sessions whose turns are all decided, or whose retention is over; return how many."""
        removed = await self._write(lambda db: removal_statements.prune(db, now, bytes_per_user))
        if removed:
            await self._thread.truncate_log()
        return removed

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._thread.run(job, writes=True)

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._thread.run(job, writes=False)


# The statements on what was not to be stored; each function runs inside one transaction, in the database's thread.

MAX_DIGESTS = 4_096
"""The most hashes that are kept of one conversation: 32 KiB, which each of its turns without consent writes again."""

_READ = "SELECT digests, is_complete FROM opt_outs WHERE conversation = ?"
_WRITE = """
INSERT INTO opt_outs (conversation, digests, is_complete, used_at) VALUES (:conversation, :digests, :is_complete, :at)
ON CONFLICT (conversation) DO UPDATE SET
    digests = excluded.digests, is_complete = excluded.is_complete, used_at = excluded.used_at
"""


def opt_outs(db: sqlite3.Connection, conversation: str) -> OptOuts:
    """Return the opt-outs of a conversation."""
    row = db.execute(_READ, (conversation,)).fetchone()
    if row is None:
        return OptOuts()
    data = row["digests"]
    places = range(0, len(data), DIGEST_BYTES)
    return OptOuts(frozenset(data[at : at + DIGEST_BYTES] for at in places), bool(row["is_complete"]))


def opt_out(db: sqlite3.Connection, conversation: str, added: OptOuts, at: float) -> None:
    """Remember further opt-outs of a conversation."""
    known = opt_outs(db, conversation)
    digests = sorted(known.digests | added.digests)
    values = {
        "conversation": conversation,
        "digests": b"".join(digests[:MAX_DIGESTS]),
        "is_complete": known.is_complete and added.is_complete and len(digests) <= MAX_DIGESTS,
        "at": at,
    }
    db.execute(_WRITE, values)


def forget_opt_outs(db: sqlite3.Connection, before: float) -> None:
    """Forget conversations that had no such turn since a time."""
    db.execute("DELETE FROM opt_outs WHERE used_at < ?", (before,))
