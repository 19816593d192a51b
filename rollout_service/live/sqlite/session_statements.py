"""Statements on sessions and their turns; each function runs inside one transaction, in the database's thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from api_schemas.rollouts.sessions import ClosedBecause, MarkReason, MaskReason
from api_schemas.sessions import FeedbackByVersion
from rollout_service.live.contract import (
    NextStateRecord,
    SessionRecord,
    TurnMarkRecord,
    TurnRecord,
    UnjudgedTurn,
)
from rollout_service.live.sqlite import contents

_COLUMNS = tuple(each.name for each in fields(SessionRecord) if each.name != "metadata")
_OPEN = f"""
INSERT INTO sessions ({", ".join(f'"{name}"' for name in _COLUMNS)})
VALUES ({", ".join(f":{name}" for name in _COLUMNS)})
ON CONFLICT (session_id) DO NOTHING RETURNING seq
"""  # noqa: S608 - the names are ours
_OF_ID = "SELECT * FROM sessions WHERE session_id = ?"
_OF_KEY = "SELECT * FROM sessions WHERE key_hash = ? AND key_hash != x''"
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
_MOVE = "UPDATE sessions SET pool = ? WHERE pool = ? AND closed_at IS NULL RETURNING session_id"
_CLOSE = """
UPDATE sessions SET closed_at = :at, closed_because = :because WHERE session_id = :id AND closed_at IS NULL
"""
_EXPIRED = """
SELECT session_id, opened_at <= :now - :age AS too_old FROM sessions
WHERE closed_at IS NULL AND (used_at <= :now - :idle OR opened_at <= :now - :age)
"""
_UNDECIDED = """
WITH waiting AS (SELECT DISTINCT session FROM turns WHERE part IS NULL AND dropped IS NULL)
UPDATE sessions SET looked_at = (SELECT max(looked_at) + 1 FROM sessions WHERE seq IN waiting) WHERE seq IN (
    SELECT seq FROM sessions WHERE seq IN waiting ORDER BY looked_at, seq LIMIT ?
) RETURNING *
"""


def open_session(db: sqlite3.Connection, session: SessionRecord) -> bool:
    """Return False, and change nothing, if the id is known."""
    row = db.execute(_OPEN, {name: getattr(session, name) for name in _COLUMNS}).fetchone()
    if row is not None:
        contents.put_metadata(db, row["seq"], session.metadata)
    return row is not None


def find(db: sqlite3.Connection, session_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = db.execute(_OF_ID, (session_id,)).fetchone()
    return row


def get(db: sqlite3.Connection, session_id: str) -> SessionRecord | None:
    return _first(db, _OF_ID, session_id)


def of_key(db: sqlite3.Connection, key_hash: bytes) -> SessionRecord | None:
    """Find no session by an empty hash."""
    return _first(db, _OF_KEY, key_hash)


def latest_of_client(db: sqlite3.Connection, client: str) -> SessionRecord | None:
    return _first(db, _OF_CLIENT, client)


def _first(db: sqlite3.Connection, query: str, value: str | bytes) -> SessionRecord | None:
    row = db.execute(query, (value,)).fetchone()
    return None if row is None else _session(db, row)


def tenants(db: sqlite3.Connection) -> list[str]:
    return [row["tenant"] for row in db.execute("SELECT DISTINCT tenant FROM sessions ORDER BY tenant")]


def page(
    db: sqlite3.Connection,
    *,
    before: tuple[float, str] | None = None,
    limit: int = 100,
    is_open: bool | None = None,
    user: str | None = None,
) -> list[SessionRecord]:
    """List sessions opened before this time and id, the newest first; `user` is a hash."""
    time, session_id = before or (None, None)
    values = {"time": time, "id": session_id, "limit": limit, "is_open": is_open, "user": user}
    return [_session(db, row) for row in db.execute(_PAGE, values).fetchall()]


def group(db: sqlite3.Connection, tenant: str, name: str) -> list[SessionRecord]:
    """Return the sessions that work on a task, the oldest first."""
    values = (name, tenant)
    rows = db.execute('SELECT * FROM sessions WHERE "group" = ? AND tenant = ? ORDER BY seq', values).fetchall()
    return [_session(db, row) for row in rows]


def had(db: sqlite3.Connection, user: str) -> int:
    """Count a user's sessions without deleted ones."""
    count: int = db.execute(_HAD, {"user": user}).fetchone()[0]
    return count


def served(db: sqlite3.Connection, session_id: str, at: float, *, opted_out: bool) -> None:
    """Note a request; an opted-out turn is counted here alone, and others when they are recorded."""
    db.execute(_SERVED, {"id": session_id, "at": at, "opted_out": opted_out})


def move(db: sqlite3.Connection, pool: str, other: str) -> list[str]:
    """Give the open sessions of a pool to another one; return their ids."""
    return [row["session_id"] for row in db.execute(_MOVE, (other, pool))]


def close(db: sqlite3.Connection, session_id: str, because: ClosedBecause, at: float) -> bool:
    """Return False if it was closed before."""
    return db.execute(_CLOSE, {"id": session_id, "because": because, "at": at}).rowcount > 0


def expired(db: sqlite3.Connection, now: float, idle: float, age: float) -> list[tuple[str, ClosedBecause]]:
    rows = db.execute(_EXPIRED, {"now": now, "idle": idle, "age": age})
    return [(row["session_id"], ClosedBecause.MAX_AGE if row["too_old"] else ClosedBecause.IDLE) for row in rows]


def undecided(db: sqlite3.Connection, limit: int) -> list[SessionRecord]:
    """Return sessions with undecided turns, those looked at longest ago first, and note the look."""
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


_RECORD = """
INSERT INTO turns (session, turn, kind, version, truncated, malformed, recorded_at, delivered, mask)
SELECT seq, :turn, :kind, :version, :truncated, :malformed, :at, :delivered, :mask
FROM sessions WHERE session_id = :id
ON CONFLICT (session, turn) DO NOTHING RETURNING session
"""
_COUNT = """
UPDATE sessions SET served = served + 1, used_at = max(used_at, :at) WHERE seq = :session
"""
_DELIVER = """
UPDATE turns SET delivered = 1
WHERE session = (SELECT seq FROM sessions WHERE session_id = :id) AND turn = :turn
"""
_MASK = """
UPDATE turns SET mask = coalesce(mask, :because)
WHERE session = (SELECT seq FROM sessions WHERE session_id = :id) AND turn = :turn
"""
_FOLLOW = """
UPDATE turns SET followed_at = :at
WHERE session = (SELECT seq FROM sessions WHERE session_id = :id) AND turn = :turn AND followed_at IS NULL
RETURNING session
"""
_SET_MARK = """
UPDATE turns SET value = :value, reason = :reason, marked_at = :at WHERE session = :session AND turn = :turn
"""
_SELECT = "SELECT turns.*, sessions.session_id FROM turns JOIN sessions ON sessions.seq = turns.session"
_FROM = f"{_SELECT} WHERE session_id = ? AND turn >= ? ORDER BY turn"
_ONE = f"{_SELECT} WHERE session_id = ? AND turn = ?"
_TO_JUDGE = """
SELECT session_id, turn, followed_at FROM turns JOIN sessions ON sessions.seq = turns.session
WHERE kind = 'main' AND delivered AND followed_at IS NOT NULL
    AND mask IS NULL AND reason IS NULL AND part IS NULL AND dropped IS NULL
ORDER BY followed_at LIMIT ?
"""
_ADD_VALUE = """
INSERT INTO version_values (pool, version, turns, total, satisfied)
SELECT pool, :version, :sign, :sign * :value, :sign * (:value > 0) FROM sessions WHERE seq = :session
ON CONFLICT (pool, version) DO UPDATE SET
    turns = turns + excluded.turns, total = total + excluded.total, satisfied = satisfied + excluded.satisfied
"""
_FIGURES = "SELECT * FROM version_values WHERE turns > 0 ORDER BY pool, version"


def record(db: sqlite3.Connection, turn: TurnRecord) -> None:
    """Keep a turn of a known session, and count it as served. A second one with the same id changes nothing."""
    values = {
        "id": turn.session_id,
        "turn": turn.turn,
        "kind": turn.kind,
        "version": turn.version,
        "truncated": turn.truncated,
        "malformed": turn.malformed,
        "at": turn.recorded_at,
        "delivered": turn.delivered,
        "mask": turn.mask,
    }
    row = db.execute(_RECORD, values).fetchone()
    if row is None:
        return
    contents.put_turn(db, row["session"], turn)
    db.execute(_COUNT, {"session": row["session"], "at": turn.recorded_at})
    if turn.next_state is not None:
        follow(db, turn.session_id, turn.turn, turn.next_state)
    if turn.mark is not None:
        mark(db, turn.session_id, turn.turn, turn.mark)


def deliver(db: sqlite3.Connection, session_id: str, turn: int) -> None:
    db.execute(_DELIVER, {"id": session_id, "turn": turn})


def mask(db: sqlite3.Connection, session_id: str, turn: int, because: MaskReason) -> None:
    """Note that a turn can never be trained on; the first reason stays."""
    db.execute(_MASK, {"id": session_id, "turn": turn, "because": because})


def follow(db: sqlite3.Connection, session_id: str, turn: int, state: NextStateRecord) -> bool:
    """Return False if it has a next state, which stays."""
    row = db.execute(_FOLLOW, {"id": session_id, "turn": turn, "at": state.arrived_at}).fetchone()
    if row is not None:
        contents.put_state(db, row["session"], turn, state)
    return row is not None


def mark(db: sqlite3.Connection, session_id: str, turn: int, mark: TurnMarkRecord) -> bool:
    """Return whether the value was set: explicit ones win over all, and the first of others stays.

    A turn that a part has taken keeps its value; the last of its user is kept as a revision.
    """
    row = db.execute(_ONE, (session_id, turn)).fetchone()
    if row is None:
        return False
    explicit = mark.reason is MarkReason.EXPLICIT
    if row["part"] is not None or row["dropped"] is not None:
        if explicit:
            contents.take_mark(db, row["session"], turn, "revision")
            contents.put_mark(db, row["session"], turn, mark, "revision")
        return False
    if row["reason"] is not None and not explicit:
        return False
    old = contents.take_mark(db, row["session"], turn)
    if old is not None and mark.hint is None:
        mark = replace(mark, hint=old.hint, hint_dropped=old.hint_dropped)
    _replace_value(db, row, mark.value)
    values = {"session": row["session"], "turn": turn, "value": mark.value, "reason": mark.reason}
    db.execute(_SET_MARK, values | {"at": mark.at})
    contents.put_mark(db, row["session"], turn, mark)
    return True


def _replace_value(db: sqlite3.Connection, turn: sqlite3.Row, value: float | None) -> None:
    """Count a turn once, with the value that it has: replace the counted one."""
    for sign, counted in ((-1, turn["value"]), (1, value)):
        if counted is not None:
            values = {"session": turn["session"], "version": turn["version"], "sign": sign, "value": counted}
            db.execute(_ADD_VALUE, values)


def turns(db: sqlite3.Connection, session_id: str, first: int = 0) -> list[TurnRecord]:
    rows = db.execute(_FROM, (session_id, first)).fetchall()
    return contents.of_session(db, rows[0]["session"], rows, first) if rows else []


def get_turn(db: sqlite3.Connection, session_id: str, turn: int) -> TurnRecord | None:
    rows = db.execute(_ONE, (session_id, turn)).fetchall()
    return contents.with_content(db, rows[0]) if rows else None


def to_judge(db: sqlite3.Connection, limit: int) -> list[UnjudgedTurn]:
    """Return turns to judge, the longest waiting first.

    They are main turns that were delivered, have a next state, and neither a mask, a mark nor a part.
    """
    return [UnjudgedTurn(*row) for row in db.execute(_TO_JUDGE, (limit,))]


def figures(db: sqlite3.Connection) -> list[FeedbackByVersion]:
    """Include turns of removed sessions."""
    return [
        FeedbackByVersion(
            pool=row["pool"],
            version=row["version"],
            turns=row["turns"],
            value_mean=row["total"] / row["turns"],
            satisfied=row["satisfied"] / row["turns"],
        )
        for row in db.execute(_FIGURES)
    ]
