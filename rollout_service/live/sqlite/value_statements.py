"""The values of turns by pool and version; each function runs inside one transaction, in the database's thread.

Guarantee: a turn counts once, with the value that it has, and still does after its session was removed.
"""

from __future__ import annotations

import sqlite3

from api_schemas.sessions import FeedbackByVersion

_ADD = """
INSERT INTO version_values (pool, version, turns, total, satisfied)
SELECT pool, :version, :sign, :sign * :value, :sign * (:value > 0) FROM sessions WHERE seq = :session
ON CONFLICT (pool, version) DO UPDATE SET
    turns = turns + excluded.turns, total = total + excluded.total, satisfied = satisfied + excluded.satisfied
"""
_FIGURES = "SELECT * FROM version_values WHERE turns > 0 ORDER BY pool, version"


def replace_value(db: sqlite3.Connection, turn: sqlite3.Row, value: float | None) -> None:
    """Count a new value of this row of `turns` in place of the one that it has."""
    for sign, counted in ((-1, turn["value"]), (1, value)):
        if counted is not None:
            values = {"session": turn["session"], "version": turn["version"], "sign": sign, "value": counted}
            db.execute(_ADD, values)


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
