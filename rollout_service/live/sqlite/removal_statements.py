"""The statements that count turns and remove sessions; each function runs inside one transaction, in the database's
thread.

Guarantee: the counts over all sessions are the same before and after a removal, except that turns about which nothing
was decided are dropped.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

from api_schemas.rollouts.sessions import MaskReason
from rollout_service.live.contract import Deleted, PartRecord
from rollout_service.live.sqlite.part_statements import parts
from rollout_service.live.sqlite.session_statements import find

SHOWN_SECONDS = 3_600.0
"""How long a closed session of which nothing is left to deliver is still shown, so that its client learns its end."""
MAX_PRUNED = 500
"""The most sessions that one call prunes, so that turns being served do not wait."""

_NOTHING = {"served": 0, "recorded": 0, "judged": 0, "delivered": 0, "waiting": 0}
_COUNT_TURNS = """
SELECT
    CASE WHEN dropped IS NOT NULL THEN 'dropped:' || dropped WHEN part IS NULL THEN 'waiting' ELSE 'delivered' END
        AS fate,
    count(*) AS turns, count(value) AS judged
FROM turns WHERE session = ? GROUP BY fate
"""
_DROP_UNDECIDED = """
UPDATE turns SET dropped = :because WHERE session = :session AND part IS NULL AND dropped IS NULL
"""
_DROP_UNCLAIMED = """
UPDATE turns SET dropped = :because WHERE session = :session AND dropped IS NULL AND part IN (
    SELECT part FROM parts WHERE parts.session = :session AND rollout_id IS NULL
)
"""
_REMOVE = (
    "DELETE FROM contents WHERE session = ?",
    "DELETE FROM turns WHERE session = ?",
    "DELETE FROM parts WHERE session = ?",
    "DELETE FROM sessions WHERE seq = ?",
)
_REMEMBER_USER = """
INSERT INTO earlier_sessions (user, count) SELECT user, 1 FROM sessions
WHERE seq = :session AND EXISTS (SELECT 1 FROM turns WHERE session = :session)
ON CONFLICT (user) DO UPDATE SET count = count + 1
"""
_EXPIRED = """
SELECT seq, session_id FROM sessions WHERE closed_at IS NOT NULL AND (
    closed_at <= :now - retention_seconds
    OR closed_at <= :now - min(retention_seconds, :shown)
        AND NOT EXISTS (SELECT 1 FROM turns WHERE session = seq AND part IS NULL AND dropped IS NULL)
        AND NOT EXISTS (SELECT 1 FROM parts WHERE session = sessions.seq)
) LIMIT :limit
"""
_TOO_LARGE = """
SELECT seq, session_id FROM (
    SELECT seq, session_id, closed_at, opened_at, bytes,
        sum(bytes) OVER (PARTITION BY user ORDER BY closed_at IS NULL DESC, opened_at DESC, seq DESC) AS newer
    FROM sessions
    WHERE user IN (SELECT user FROM sessions GROUP BY user HAVING sum(bytes) > :bytes)
) WHERE newer > :bytes AND closed_at IS NOT NULL LIMIT :limit
"""


def counts(db: sqlite3.Connection, session_id: str | None = None) -> Counter[str]:
    """Return the numbers of turns: `served`, `recorded`, `judged`, `delivered`, `waiting`, `dropped:<reason>`.

    Without an id they are over all sessions, removed ones included; those are kept up to date by triggers, so that
    reading them takes no longer as traffic grows. There are none of a session that is unknown.
    """
    if session_id is not None:
        session = find(db, session_id)
        return Counter() if session is None else _counts_of(db, session["seq"])
    totals = {row["name"]: row["count"] for row in db.execute("SELECT * FROM totals")}
    return Counter(_NOTHING | totals)


def _counts_of(db: sqlite3.Connection, session: int) -> Counter[str]:
    found = Counter(_NOTHING)
    for row in db.execute(_COUNT_TURNS, (session,)):
        found[row["fate"]] += row["turns"]
        found["recorded"] += row["turns"]
        found["judged"] += row["judged"]
    opted_out = int(
        db.execute("SELECT opted_out FROM sessions WHERE seq = ?", (session,)).fetchone()["opted_out"]
    )
    if opted_out:
        found[f"dropped:{MaskReason.OPTED_OUT}"] += opted_out
    found["served"] = found["recorded"] + opted_out
    return found


def delete(db: sqlite3.Connection, *, session_id: str | None, user: str | None) -> Deleted:
    """Remove a session, or all of a user."""
    rows = db.execute(
        "SELECT seq, session_id FROM sessions WHERE session_id = :id OR user = :user ORDER BY seq",
        {"id": session_id, "user": user},
    ).fetchall()
    kept: list[PartRecord] = []
    turns = 0
    for row in rows:
        kept += parts(db, session_id=row["session_id"])
        turns += _counts_of(db, row["seq"])["recorded"]
        _remove(db, row["seq"], MaskReason.OPTED_OUT)
    if user is not None:
        db.execute("DELETE FROM earlier_sessions WHERE user = ?", (user,))
    return Deleted(sessions=tuple(row["session_id"] for row in rows), turns=turns, parts=tuple(kept))


def prune(db: sqlite3.Connection, now: float, bytes_per_user: int | None) -> int:
    """Remove closed sessions that need not be kept, some at a time."""
    limits: Mapping[str, object] = {
        "now": now,
        "shown": SHOWN_SECONDS,
        "limit": MAX_PRUNED,
        "bytes": bytes_per_user,
    }
    removed = _prune(db, db.execute(_EXPIRED, limits).fetchall())
    if bytes_per_user is not None:
        removed += _prune(db, db.execute(_TOO_LARGE, limits).fetchall())
    return removed


def _prune(db: sqlite3.Connection, rows: Sequence[sqlite3.Row]) -> int:
    for row in rows:
        db.execute(_REMEMBER_USER, {"session": row["seq"]})
        _remove(db, row["seq"], MaskReason.NO_RUN)
    return len(rows)


def _remove(db: sqlite3.Connection, session: int, because: MaskReason) -> None:
    for statement in (_DROP_UNDECIDED, _DROP_UNCLAIMED):
        db.execute(statement, {"session": session, "because": because})
    for statement in _REMOVE:
        db.execute(statement, (session,))
