"""The statements on turns, and on their values by pool and version; each function runs inside one transaction, in the
database's thread.

Guarantee: a turn counts once, with the value that it has, and still does after its session was removed.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from api_schemas.rollouts.sessions import MarkReason, MaskReason
from api_schemas.sessions import FeedbackByVersion
from rollout_service.live.contract import NextStateRecord, TurnMarkRecord, TurnRecord, UnjudgedTurn
from rollout_service.live.sqlite import contents

_RECORD = """
INSERT INTO turns (session, turn, kind, version, truncated, malformed, recorded_at, delivered, mask)
SELECT seq, :turn, :kind, :version, :truncated, :malformed, :at, :delivered, :mask
FROM sessions WHERE session_id = :id
ON CONFLICT (session, turn) DO NOTHING RETURNING session
"""
_COUNT = """
UPDATE sessions SET served = served + 1, bytes = bytes + :bytes, used_at = max(used_at, :at) WHERE seq = :session
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
    """Keep a turn of a known session, and count it as served. One with the same id changes nothing."""
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
    size = contents.put_turn(db, row["session"], turn)
    db.execute(_COUNT, {"session": row["session"], "bytes": size, "at": turn.recorded_at})
    if turn.next_state is not None:
        follow(db, turn.session_id, turn.turn, turn.next_state)
    if turn.mark is not None:
        mark(db, turn.session_id, turn.turn, turn.mark)


def deliver(db: sqlite3.Connection, session_id: str, turn: int) -> None:
    """Note that the client got the turn's last token."""
    db.execute(_DELIVER, {"id": session_id, "turn": turn})


def mask(db: sqlite3.Connection, session_id: str, turn: int, because: MaskReason) -> None:
    """Note that a turn can never be trained on; the first reason stays."""
    db.execute(_MASK, {"id": session_id, "turn": turn, "because": because})


def follow(db: sqlite3.Connection, session_id: str, turn: int, state: NextStateRecord) -> bool:
    """Set a turn's next state; return False if it has one, which stays."""
    row = db.execute(_FOLLOW, {"id": session_id, "turn": turn, "at": state.arrived_at}).fetchone()
    if row is not None:
        size = contents.put_state(db, row["session"], turn, state)
        db.execute("UPDATE sessions SET bytes = bytes + ? WHERE seq = ?", (size, row["session"]))
    return row is not None


def mark(db: sqlite3.Connection, session_id: str, turn: int, mark: TurnMarkRecord) -> bool:
    """Set a turn's value unless it has one that wins: explicit ones win over all, and the first of others stays.

    Return whether it was set. A turn that a part has taken keeps its value; the new one is kept as a revision.
    """
    row = db.execute(_ONE, (session_id, turn)).fetchone()
    if row is None:
        return False
    explicit = mark.reason is MarkReason.EXPLICIT
    if row["part"] is not None or row["dropped"] is not None:
        if explicit:
            contents.put_mark(db, row["session"], turn, mark, "revision")
        return False
    if row["reason"] is not None and not explicit:
        return False
    old = contents.mark_of(db, row["session"], turn)
    if old is not None and mark.hint is None:
        mark = replace(mark, hint=old.hint, hint_dropped=old.hint_dropped)
    _replace_value(db, row, mark.value)
    values = {"session": row["session"], "turn": turn, "value": mark.value, "reason": mark.reason}
    db.execute(_SET_MARK, values | {"at": mark.at})
    contents.put_mark(db, row["session"], turn, mark)
    return True


def _replace_value(db: sqlite3.Connection, turn: sqlite3.Row, value: float | None) -> None:
    """Count a new value of this row of `turns` in place of the one that it has."""
    for sign, counted in ((-1, turn["value"]), (1, value)):
        if counted is not None:
            values = {"session": turn["session"], "version": turn["version"], "sign": sign, "value": counted}
            db.execute(_ADD_VALUE, values)


def turns(db: sqlite3.Connection, session_id: str, first: int = 0) -> list[TurnRecord]:
    """Return the turns of a session from this one on, by their ids."""
    rows = db.execute(_FROM, (session_id, first)).fetchall()
    return contents.of_session(db, rows[0]["session"], rows, first) if rows else []


def get(db: sqlite3.Connection, session_id: str, turn: int) -> TurnRecord | None:
    """Return a turn."""
    rows = db.execute(_ONE, (session_id, turn)).fetchall()
    return contents.with_content(db, rows[0]) if rows else None


def to_judge(db: sqlite3.Connection, limit: int) -> list[UnjudgedTurn]:
    """Return turns that may be judged and are not, the longest waiting first.

    They are main turns that were delivered, have a next state, and neither a mask, a mark nor a part.
    """
    return [UnjudgedTurn(*row) for row in db.execute(_TO_JUDGE, (limit,))]


def figures(db: sqlite3.Connection) -> list[FeedbackByVersion]:
    """Return the values of turns by their session's pool and by their version, removed ones included."""
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
