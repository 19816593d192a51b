"""The store of live sessions in one SQLite file: `async with SqliteLiveStore(path) as store:`.

A write whose method has returned is on the disk, or in the operating system's hands; a turn is in at most one part, and
a part in at most one rollout; deleting leaves no byte of a session in the store's files. Only one process at a time can
have the file open, only its owner can read it, and writes that wait at the same time share one transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from api_schemas.rollouts.sessions import MaskReason
from rollout_service.base.errors import StoreError
from rollout_service.live.contract import DIGEST_BYTES, Deleted, OptOuts, PartRecord, SessionRecord
from rollout_service.live.sqlite import part_statements, session_statements
from rollout_service.live.sqlite.schema import LIVE
from rollout_service.store.sqlite.schema import Disk
from rollout_service.store.sqlite.thread import DatabaseThread, reads, writes

PAGE = 1_000
"""Records that are read at once."""

_READ = "SELECT digests, is_complete FROM opt_outs WHERE conversation = ?"
_WRITE = """
INSERT INTO opt_outs (conversation, digests, is_complete, used_at) VALUES (:conversation, :digests, :is_complete, :at)
ON CONFLICT (conversation) DO UPDATE SET
    digests = excluded.digests, is_complete = excluded.is_complete, used_at = excluded.used_at
"""


def opt_outs(db: sqlite3.Connection, conversation: str) -> OptOuts:
    """Return the opt-outs of a conversation, also once its sessions are gone."""
    row = db.execute(_READ, (conversation,)).fetchone()
    if row is None:
        return OptOuts()
    data = row["digests"]
    places = range(0, len(data), DIGEST_BYTES)
    return OptOuts(frozenset(data[at : at + DIGEST_BYTES] for at in places), bool(row["is_complete"]))


def opt_out(db: sqlite3.Connection, conversation: str, added: OptOuts, at: float) -> None:
    all_ = opt_outs(db, conversation).with_others(added)
    values = {
        "conversation": conversation,
        "digests": b"".join(sorted(all_.digests)),
        "is_complete": all_.is_complete,
        "at": at,
    }
    db.execute(_WRITE, values)


def forget_opt_outs(db: sqlite3.Connection, before: float) -> None:
    db.execute("DELETE FROM opt_outs WHERE used_at < ?", (before,))


class SqliteLiveStore:
    """The durable sessions of one node; the path `:memory:` is for tests.

    Most methods are statements, which describe them.

    Raises:
        StoreError: On entering, if another process has the file open, or it is damaged, or cannot be created. Every
            method can raise it.
    """

    def __init__(self, path: Path | str, disk: Disk = "local") -> None:
        self._path = path
        self._schema = LIVE.on_disk(disk)
        self._thread: DatabaseThread
        self._log_is_clean = False
        """The log has nothing that was deleted; it may after a crash."""

    async def __aenter__(self) -> Self:
        self._thread = DatabaseThread(self._path, lambda _: None, self._schema)
        await self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._thread.close()

    async def failed(self) -> None:
        """Wait until a defect makes the store fail for good, and raise its StoreError."""
        await self._thread.failed()

    @property
    def problem(self) -> StoreError | None:
        """Why writing fails at the moment, as far as known."""
        return self._thread.problem

    open = writes(session_statements.open_session)
    session = reads(session_statements.get)
    session_of_key = reads(session_statements.of_key)
    latest_of_client = reads(session_statements.latest_of_client)
    sessions = reads(session_statements.page)
    group = reads(session_statements.group)
    sessions_of = reads(session_statements.had)
    tenants = reads(session_statements.tenants)
    served = writes(session_statements.served)
    opt_out = writes(opt_out)
    opt_outs = reads(opt_outs)
    forget_opt_outs = writes(forget_opt_outs)

    move = writes(session_statements.move)
    close_session = writes(session_statements.close)
    expired = reads(session_statements.expired)
    record = writes(session_statements.record)
    deliver = writes(session_statements.deliver)
    mask = writes(session_statements.mask)
    follow = writes(session_statements.follow)
    mark = writes(session_statements.mark)
    turns = reads(session_statements.turns)
    turn = reads(session_statements.get_turn)
    to_judge = reads(session_statements.to_judge)
    undecided = writes(session_statements.undecided)
    fates = reads(part_statements.fates)

    async def all_sessions(
        self, *, is_open: bool | None = None, user: str | None = None
    ) -> AsyncIterator[SessionRecord]:
        """Yield sessions, the newest first, read a page at a time."""
        before: tuple[float, str] | None = None
        while page := await self.sessions(before=before, limit=PAGE, is_open=is_open, user=user):
            for record in page:
                yield record
            before = (page[-1].opened_at, page[-1].session_id)

    async def take_part(
        self,
        session_id: str,
        run_id: str | None,
        usable: Sequence[int],
        dropped: Mapping[int, MaskReason],
        at: float,
    ) -> PartRecord | None:
        """Put all turns into a part, or none if one is in a part.

        Without usable turns there is no part: the dropped ones are decided, and None is returned.
        """
        if usable and run_id is None:
            raise ValueError("a part with usable turns needs a run")
        return await self._thread.write(part_statements.take, session_id, run_id, usable, dropped, at)

    parts = reads(part_statements.parts)
    give_back_part = writes(part_statements.give_back)
    set_offset = writes(part_statements.set_offset)
    claim = writes(part_statements.claim)
    counts = reads(part_statements.counts)
    feedback = reads(session_statements.figures)
    withdraw = writes(part_statements.withdraw)

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> Deleted:
        """Leave no byte of a session, or of all of a user's, in the store's files; counts stay.

        While another program reads the file, the log keeps them, and a later `prune` removes them.
        """
        if (session_id is None) == (user is None):
            raise ValueError("name a session or a user")
        deleted = await self._thread.write(part_statements.delete, session_id=session_id, user=user)
        self._log_is_clean = False
        await self._clean_log()
        return deleted

    async def prune(self, now: float, bytes_per_user: int | None) -> int:
        """Remove closed sessions whose turns are all decided, or whose retention is over; return their number."""
        removed = await self._thread.write(part_statements.prune, now, bytes_per_user)
        self._log_is_clean = self._log_is_clean and not removed
        if not self._log_is_clean:
            await self._clean_log()
        return removed

    async def _clean_log(self) -> None:
        self._log_is_clean = True
        try:
            await self._thread.truncate_log()
        except BaseException:
            self._log_is_clean = False
            raise
