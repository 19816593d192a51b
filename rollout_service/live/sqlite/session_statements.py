"""The statements on sessions; each function runs inside one transaction, in the database's thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from api_schemas.rollouts.sessions import ClosedBecause
from rollout_service.live.contract import SessionRecord
from rollout_service.live.sqlite import contents

_COLUMNS = (
    "session_id",
    "key_hash",
    "pool",
    "user",
    "tenant",
    "train",
    "explicit",
    "client",
    "quarantined",
    "retention_seconds",
    "continues",
    "group",
    "opened_at",
    "used_at",
    "closed_at",
    "closed_because",
    "served",
    "opted_out",
)
_OPEN = """
INSERT INTO sessions (
    session_id, key_hash, pool, user, tenant, train, explicit, client, quarantined, retention_seconds, continues,
    "group", opened_at, used_at, closed_at, closed_because, served, opted_out
) VALUES (
    :session_id, :key_hash, :pool, :user, :tenant, :train, :explicit, :client, :quarantined, :retention_seconds,
    :continues, :group, :opened_at, :used_at, :closed_at, :closed_because, :served, :opted_out
)
ON CONFLICT (session_id) DO NOTHING RETURNING seq
"""
_OF_CLIENT = "SELECT * FROM sessions WHERE client = ? AND client != '' ORDER BY seq DESC LIMIT 1"
_PAGE = """
SELECT * FROM sessions
WHERE (:is_open IS NULL OR (closed_at IS NULL) = :is_open)
    AND (:time IS NULL OR (opened_at, session_id) < (:time, :id))
    AND (:user IS NULL OR user = :user)
ORDER BY opened_at DESC, session_id DESC LIMIT :limit
"""
_HAD = """
SELECT (SELECT count(*) FROM sessions WHERE user = :user)
    + coalesce((SELECT count FROM earlier_sessions WHERE user = :user), 0)
"""
_SERVED = """
UPDATE sessions SET used_at = max(used_at, :at), served = served + :opted_out, opted_out = opted_out + :opted_out
WHERE session_id = :id
"""
_CLOSE = """
UPDATE sessions SET closed_at = :at, closed_because = :because WHERE session_id = :id AND closed_at IS NULL
"""
_EXPIRED = """
SELECT session_id, opened_at <= :now - :age AS too_old FROM sessions
WHERE closed_at IS NULL AND (used_at <= :now - :idle OR opened_at <= :now - :age)
"""
_UNDECIDED = """
UPDATE sessions SET looked_at = (SELECT max(looked_at) + 1 FROM sessions) WHERE seq IN (
    SELECT seq FROM sessions
    WHERE EXISTS (SELECT 1 FROM turns WHERE session = seq AND part IS NULL AND dropped IS NULL)
    ORDER BY looked_at, seq LIMIT ?
) RETURNING *
"""


def open_session(db: sqlite3.Connection, session: SessionRecord) -> bool:
    """Keep a new session; return False, and change nothing, if its id is known."""
    row = db.execute(_OPEN, {name: getattr(session, name) for name in _COLUMNS}).fetchone()
    if row is not None:
        contents.put_metadata(db, row["seq"], session.metadata)
    return row is not None


def find(db: sqlite3.Connection, session_id: str) -> sqlite3.Row | None:
    """Return a session's row."""
    row: sqlite3.Row | None = db.execute(
        "SELECT * FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return row


def get(db: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    """Return a session."""
    row = find(db, session_id)
    return None if row is None else _session(db, row)


def of_key(db: sqlite3.Connection, key_hash: bytes) -> SessionRecord | None:
    """Return the session of a key; sessions without a key have none."""
    row = db.execute("SELECT * FROM sessions WHERE key_hash = ? AND key_hash != x''", (key_hash,)).fetchone()
    return None if row is None else _session(db, row)


def latest_of_client(db: sqlite3.Connection, client: str) -> SessionRecord | None:
    """Return the newest session of a client's own id, by its hash."""
    row = db.execute(_OF_CLIENT, (client,)).fetchone()
    return None if row is None else _session(db, row)


def tenants(db: sqlite3.Connection) -> list[str]:
    """Return the tenants that have sessions."""
    return [row["tenant"] for row in db.execute("SELECT DISTINCT tenant FROM sessions ORDER BY tenant")]


def page(
    db: sqlite3.Connection,
    *,
    before: tuple[float, str] | None = None,
    limit: int = 100,
    is_open: bool | None = None,
    user: str | None = None,
) -> list[SessionRecord]:
    """Return sessions, the newest first, that were opened before this time and id; `user` is a hash."""
    time, session_id = before or (None, None)
    values = {"time": time, "id": session_id, "limit": limit, "is_open": is_open, "user": user}
    return [_session(db, row) for row in db.execute(_PAGE, values).fetchall()]


def group(db: sqlite3.Connection, tenant: str, name: str) -> list[SessionRecord]:
    """Return a tenant's sessions that work on the same task, the oldest first."""
    values = (name, tenant)
    rows = db.execute(
        'SELECT * FROM sessions WHERE "group" = ? AND tenant = ? ORDER BY seq', values
    ).fetchall()
    return [_session(db, row) for row in rows]


def had(db: sqlite3.Connection, user: str) -> int:
    """Return how many sessions a user has had, deleted ones not counted."""
    count: int = db.execute(_HAD, {"user": user}).fetchone()[0]
    return count


def served(db: sqlite3.Connection, session_id: str, at: float, *, opted_out: bool) -> None:
    """Note that a turn was served. One that is opted out is counted here, and leaves nothing else; others are
    counted when they are recorded.
    """
    db.execute(_SERVED, {"id": session_id, "at": at, "opted_out": opted_out})


def close(db: sqlite3.Connection, session_id: str, because: ClosedBecause, at: float) -> bool:
    """Close a session; return False if it was closed before."""
    return db.execute(_CLOSE, {"id": session_id, "because": because, "at": at}).rowcount > 0


def expired(db: sqlite3.Connection, now: float, idle: float, age: float) -> list[tuple[str, ClosedBecause]]:
    """Return the open sessions whose last request, or whose opening, is longer ago than allowed."""
    rows = db.execute(_EXPIRED, {"now": now, "idle": idle, "age": age})
    return [
        (row["session_id"], ClosedBecause.MAX_AGE if row["too_old"] else ClosedBecause.IDLE) for row in rows
    ]


def undecided(db: sqlite3.Connection, limit: int) -> list[SessionRecord]:
    """Return sessions with a turn that is in no part, those first that were looked at longest ago, and note it."""
    rows: Sequence[sqlite3.Row] = db.execute(_UNDECIDED, (limit,)).fetchall()
    return [_session(db, row) for row in sorted(rows, key=lambda row: row["seq"])]


def _session(db: sqlite3.Connection, row: sqlite3.Row) -> SessionRecord:
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    for name in ("train", "explicit", "quarantined"):
        values[name] = bool(values[name])
    because = values.pop("closed_because")
    return SessionRecord(
        **values,
        closed_because=None if because is None else ClosedBecause(because),
        metadata=contents.metadata(db, row["seq"]),
    )
