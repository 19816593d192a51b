"""The statements on saved turns, and on the steps of attempts; each function runs inside one transaction, in the
database's thread.

A turn is saved only while its lease is held and if it is the next of its rollout. A trigger deletes the turns of a
rollout that ends.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from rollout_service.store.contract import MAX_RECORDS, EncodedSteps, UnsavedTurn

_SAVE = """
INSERT INTO turns (rollout, number, data)
SELECT seq, :number, :data FROM rollouts
WHERE rollout_id = :id AND owner = :owner AND token = :token
    AND :number = (SELECT coalesce(max(number) + 1, 0) FROM turns WHERE rollout = seq)
"""
_SAVED = """
SELECT data FROM turns WHERE rollout = (SELECT seq FROM rollouts WHERE rollout_id = ?) ORDER BY number
"""
_SAVE_STEPS = """
INSERT INTO steps (rollout, number, data)
SELECT seq, (SELECT count(*) FROM steps WHERE rollout = seq), :data FROM rollouts
WHERE rollout_id = :id AND (SELECT count(*) FROM steps WHERE rollout = seq) < :most
    AND NOT EXISTS (SELECT 1 FROM steps WHERE rollout = seq AND number = -1)
"""
_FORGET_STEPS = (
    """
DELETE FROM steps WHERE rollout IN (
    SELECT seq FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))
)
""",
    """
INSERT INTO steps (rollout, number, data)
SELECT seq, -1, x'' FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))
""",
)
_SAVED_STEPS = """
SELECT rollout_id, data FROM rollouts JOIN steps ON steps.rollout = rollouts.seq
WHERE rollout_id IN (SELECT value FROM json_each(?)) AND number >= 0 ORDER BY rollouts.seq, number
"""
_DELETE = "DELETE FROM turns WHERE rollout = (SELECT seq FROM rollouts WHERE rollout_id = :id)"
_RESTART = """
UPDATE rollouts SET
    state = iif(cancel, 'cancelled', 'queued'), stop_reason = iif(cancel, 'cancelled', NULL),
    owner = NULL, attempt = attempt - (state != 'queued'), spans = :spans, queued_at = :now, changed_at = :now
WHERE rollout_id = :id AND owner = :owner AND token = :token
RETURNING rollout_id, state
"""


def save(db: sqlite3.Connection, owner: str, turns: Sequence[UnsavedTurn]) -> int:
    """Save turns; return how many were saved."""
    return sum(
        db.execute(
            _SAVE,
            {
                "id": turn.rollout_id,
                "owner": owner,
                "token": turn.token,
                "number": turn.number,
                "data": turn.data,
            },
        ).rowcount
        for turn in turns
    )


def saved(db: sqlite3.Connection, rollout_id: str) -> list[bytes]:
    """Return the data of a rollout's turns, in order."""
    return [row["data"] for row in db.execute(_SAVED, (rollout_id,))]


def delete(db: sqlite3.Connection, values: dict[str, Any]) -> None:
    """Delete the turns of the rollout `id`."""
    db.execute(_DELETE, values)


def restart(db: sqlite3.Connection, values: dict[str, Any]) -> list[sqlite3.Row]:
    """Requeue a leased rollout without its turns; return its row, or nothing if the lease is lost."""
    rows = db.execute(_RESTART, values).fetchall()
    if rows:
        delete(db, values)
    return rows


def save_steps(db: sqlite3.Connection, attempts: Sequence[EncodedSteps]) -> int:
    """Store the steps of attempts; return how many were stored."""
    return sum(
        db.execute(_SAVE_STEPS, {"id": one.rollout_id, "data": one.data, "most": MAX_RECORDS}).rowcount
        for one in attempts
    )


def saved_steps(db: sqlite3.Connection, rollout_ids: Sequence[str]) -> dict[str, list[bytes]]:
    """Return the stored steps of rollouts."""
    found: dict[str, list[bytes]] = {}
    for row in db.execute(_SAVED_STEPS, (json.dumps(list(rollout_ids)),)):
        found.setdefault(row["rollout_id"], []).append(row["data"])
    return found
