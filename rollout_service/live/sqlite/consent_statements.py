"""The statements on what was not to be stored; each function runs inside one transaction, in the database's thread."""

from __future__ import annotations

import sqlite3

from rollout_service.live.contract import DIGEST_BYTES, OptOuts

MAX_DIGESTS = 4_096
"""The most hashes that are kept of one conversation: 32 KiB, which each of its turns without consent writes again."""

_READ = "SELECT digests, is_complete FROM opt_outs WHERE conversation = ?"
_WRITE = """
INSERT INTO opt_outs (conversation, digests, is_complete, used_at) VALUES (:conversation, :digests, :is_complete, :at)
ON CONFLICT (conversation) DO UPDATE SET
    digests = excluded.digests, is_complete = excluded.is_complete, used_at = excluded.used_at
"""


def opt_outs(db: sqlite3.Connection, conversation: str) -> OptOuts:
    """Return what of a conversation was not to be stored."""
    row = db.execute(_READ, (conversation,)).fetchone()
    if row is None:
        return OptOuts()
    data = row["digests"]
    places = range(0, len(data), DIGEST_BYTES)
    return OptOuts(frozenset(data[at : at + DIGEST_BYTES] for at in places), bool(row["is_complete"]))


def opt_out(db: sqlite3.Connection, conversation: str, added: OptOuts, at: float) -> None:
    """Remember what of a conversation was not to be stored."""
    known = opt_outs(db, conversation)
    digests = sorted(known.digests | added.digests)
    values = {
        "conversation": conversation,
        "digests": b"".join(digests[:MAX_DIGESTS]),
        "is_complete": known.is_complete and added.is_complete and len(digests) <= MAX_DIGESTS,
        "at": at,
    }
    db.execute(_WRITE, values)


def forget(db: sqlite3.Connection, before: float) -> None:
    """Forget conversations that had no such turn since a time."""
    db.execute("DELETE FROM opt_outs WHERE used_at < ?", (before,))
