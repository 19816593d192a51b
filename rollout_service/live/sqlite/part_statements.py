"""Statements on parts, counts and removals; each function runs inside one transaction, in the database's thread."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from rollout_service.live.contract import Deleted, PartRecord, PendingTurn
from rollout_service.live.sqlite.contents import take_mark
from rollout_service.live.sqlite.session_statements import find, mark

_DECIDE = """
UPDATE turns SET part = :part, dropped = :dropped
WHERE session = :session AND turn = :turn AND part IS NULL AND dropped IS NULL
"""
_TAKE = """
INSERT INTO parts (session, part, run_id, usable, closed_at)
SELECT :session, (SELECT coalesce(max(part) + 1, 0) FROM parts WHERE session = :session), :run, :usable, :at
RETURNING part
"""
_SELECT = "SELECT parts.*, sessions.session_id FROM parts JOIN sessions ON sessions.seq = parts.session"
_ONE = f"{_SELECT} WHERE session_id = ? AND part = ?"
_FATES = """
SELECT session_id, turns.* FROM turns JOIN sessions ON sessions.seq = turns.session
WHERE session_id IN (SELECT value FROM json_each(?)) AND part IS NULL AND dropped IS NULL
ORDER BY session, turn
"""
_UNDO = """
UPDATE turns SET part = NULL, dropped = NULL
WHERE session = (SELECT session FROM parts WHERE seq = :seq) AND part = (SELECT part FROM parts WHERE seq = :seq)
RETURNING turn
"""
_SET_OFFSET = """
UPDATE parts SET "offset" = :offset
WHERE session = (SELECT seq FROM sessions WHERE session_id = :id) AND part = :part
"""


def take(
    db: sqlite3.Connection,
    session_id: str,
    run_id: str | None,
    usable: Sequence[int],
    dropped: Mapping[int, MaskReason],
    at: float,
) -> PartRecord | None:
    """Put turns into a new part; without usable ones, decide them without a part."""
    session = find(db, session_id)
    if session is None or not _all_undecided(db, session["seq"], [*usable, *dropped]):
        return None
    part = None
    if usable:
        values = {"session": session["seq"], "run": run_id, "usable": json.dumps(sorted(usable)), "at": at}
        part = db.execute(_TAKE, values).fetchone()["part"]
    reasons: dict[int, MaskReason | None] = dict.fromkeys(usable) | dict(dropped)
    for turn, reason in reasons.items():
        db.execute(_DECIDE, {"session": session["seq"], "turn": turn, "part": part, "dropped": reason})
    return None if part is None else _part(db.execute(_ONE, (session_id, part)).fetchone())


def _all_undecided(db: sqlite3.Connection, session: int, turns: Sequence[int]) -> bool:
    rows = db.execute("SELECT turn FROM turns WHERE session = ? AND part IS NULL AND dropped IS NULL", (session,))
    return {row["turn"] for row in rows} >= set(turns)


def fates(db: sqlite3.Connection, session_ids: Sequence[str]) -> dict[str, list[PendingTurn]]:
    found: dict[str, list[PendingTurn]] = {}
    for row in db.execute(_FATES, (json.dumps(list(session_ids)),)):
        found.setdefault(row["session_id"], []).append(_fate(row))
    return found


def _fate(row: sqlite3.Row) -> PendingTurn:
    return PendingTurn(
        turn=row["turn"],
        kind=TurnKind(row["kind"]),
        recorded_at=row["recorded_at"],
        delivered=bool(row["delivered"]),
        mask=None if row["mask"] is None else MaskReason(row["mask"]),
        followed_at=row["followed_at"],
        marked_at=row["marked_at"],
        value=row["value"],
    )


def give_back(db: sqlite3.Connection, session_id: str, part: int) -> bool:
    """Undo a part that no rollout has, so that its turns can go into another; return False if one has it.

    What users have said of its turns meanwhile is their value now.
    """
    row = db.execute(_ONE, (session_id, part)).fetchone()
    if row is None or row["rollout_id"] is not None:
        return False
    turns = db.execute(_UNDO, {"seq": row["seq"]}).fetchall()
    db.execute("DELETE FROM parts WHERE seq = ?", (row["seq"],))
    for turn in sorted(each["turn"] for each in turns):
        if (revision := take_mark(db, row["session"], turn, "revision")) is not None:
            mark(db, session_id, turn, revision)
    return True


def parts(
    db: sqlite3.Connection,
    run_id: str | None = None,
    *,
    unclaimed: bool = False,
    session_id: str | None = None,
) -> list[PartRecord]:
    given = {"run_id = :run": run_id is not None, "session_id = :id": session_id is not None}
    asked = [condition for condition, is_asked in (given | {"rollout_id IS NULL": unclaimed}).items() if is_asked]
    where = " AND ".join(asked) or "TRUE"  # one of these alone, so that its index is used
    rows = db.execute(f"{_SELECT} WHERE {where} ORDER BY parts.seq", {"run": run_id, "id": session_id})
    return [_part(row) for row in rows]


def set_offset(db: sqlite3.Connection, session_id: str, part: int, offset: int | None) -> None:
    """Store the task's number in its run before the task is appended."""
    db.execute(_SET_OFFSET, {"id": session_id, "part": part, "offset": offset})


def claim(db: sqlite3.Connection, parts: Sequence[tuple[str, int]], rollout_id: str) -> PartRecord | None:
    """Give a rollout its own part, or the first free one; return None if there is none."""
    rows = [row for one in parts if (row := db.execute(_ONE, one).fetchone()) is not None]
    own = [row for row in rows if row["rollout_id"] == rollout_id]
    if own:
        return _part(own[0])
    for row in rows:
        if row["rollout_id"] is None:
            db.execute("UPDATE parts SET rollout_id = ? WHERE seq = ?", (rollout_id, row["seq"]))
            return _part(db.execute(_ONE, (row["session_id"], row["part"])).fetchone())
    return None


def _part(row: sqlite3.Row) -> PartRecord:
    return PartRecord(
        session_id=row["session_id"],
        part=row["part"],
        run_id=row["run_id"],
        usable=tuple(json.loads(row["usable"])),
        offset=row["offset"],
        rollout_id=row["rollout_id"],
        closed_at=row["closed_at"],
    )


SHOWN_SECONDS = 3_600.0
"""A closed session with nothing to deliver is shown for so long, so that its client learns its end."""
MAX_PRUNED = 500
"""Sessions that one call prunes, so that turns being served do not wait."""

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
_WITHDRAW = """
UPDATE sessions SET closed_because = 'deleted' WHERE session_id = :id OR user = :user RETURNING session_id
"""
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
    """Count turns: `served`, `recorded`, `judged`, `delivered`, `waiting`, `dropped:<reason>`.

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
    opted_out = int(db.execute("SELECT opted_out FROM sessions WHERE seq = ?", (session,)).fetchone()["opted_out"])
    if opted_out:
        found[f"dropped:{MaskReason.OPTED_OUT}"] += opted_out
    found["served"] = found["recorded"] + opted_out
    return found


def withdraw(db: sqlite3.Connection, *, session_id: str | None, user: str | None) -> list[str]:
    """Keep rollouts from beginning with parts of a session, or of all of a user's; return the sessions' ids."""
    return [row["session_id"] for row in db.execute(_WITHDRAW, {"id": session_id, "user": user})]


def delete(db: sqlite3.Connection, *, session_id: str | None, user: str | None) -> Deleted:
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
    """Remove some closed sessions that need not be kept; their undecided turns count as dropped."""
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
