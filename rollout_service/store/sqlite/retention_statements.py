"""The deletion of expired records; each function runs inside one transaction, in the database's thread.

Guarantees: nothing that a trainer still has to acknowledge is deleted, nor any rollout that has not ended. A
transaction deletes a bounded number of groups or rollouts, so other jobs do not wait for long.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from rollout_service.settings import RetentionSettings

GROUPS_AT_ONCE = 64
ROLLOUTS_AT_ONCE = 512

_SETTLED = """
SELECT seq, run, number FROM groups
WHERE state IN ('acknowledged', 'dropped') AND pruned < 2 AND changed_at <= ? ORDER BY seq LIMIT ?
"""
_OF_RUN = "SELECT seq, run, number FROM groups WHERE run = ? AND pruned < 2 LIMIT ?"
_EMPTY = "UPDATE groups SET pruned = 2, samples = '[]', summary = '{}', members = '[]' WHERE seq = ?"
_OVER = """
SELECT seq FROM runs WHERE state IN ('ended', 'finished') AND changed_at <= :before
    AND NOT EXISTS (
        SELECT 1 FROM tallies WHERE run = runs.seq AND name IN ('open', 'ready', 'batched') AND count > 0
    )
    AND NOT EXISTS (SELECT 1 FROM groups WHERE run = runs.seq AND changed_at > :before)
ORDER BY seq LIMIT 1
"""
_DELETE_RUN = (
    "DELETE FROM groups WHERE run = ?",
    "DELETE FROM group_history WHERE run = ?",
    "DELETE FROM batches WHERE run = ?",
    "DELETE FROM tallies WHERE run = ?",
    "DELETE FROM run_tasks WHERE run = ?",
    "DELETE FROM runs WHERE seq = ?",
)
_PLAIN = """
SELECT seq, state FROM rollouts WHERE state IN ('completed', 'failed', 'cancelled') AND changed_at <= ?
    AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.seq = rollouts.run)
LIMIT ?
"""
_OF_GROUP = "SELECT seq, state FROM rollouts WHERE run = :run AND group_number = :number"
_DELETE_ROWS = (
    "DELETE FROM steps WHERE rollout IN (SELECT value FROM json_each(?))",
    "DELETE FROM results WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM requests WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM rollouts WHERE seq IN (SELECT value FROM json_each(?))",
)
_COUNT = "UPDATE counts SET count = count - 1 WHERE state = ?"


def delete_expired(db: sqlite3.Connection, keep: RetentionSettings, now: float) -> int:
    """Delete some of the records that have expired; return 0 once none is left."""
    deleted = 0
    if keep.ended_run_seconds is not None:
        deleted += _delete_run(db, now - keep.ended_run_seconds)
    if keep.settled_group_seconds is not None:
        deleted += _empty(
            db, db.execute(_SETTLED, (now - keep.settled_group_seconds, GROUPS_AT_ONCE)).fetchall()
        )
    if keep.rollout_seconds is not None:
        rows = db.execute(_PLAIN, (now - keep.rollout_seconds, ROLLOUTS_AT_ONCE)).fetchall()
        deleted += _delete_rollouts(db, rows)
    return deleted


def _delete_run(db: sqlite3.Connection, before: float) -> int:
    """Delete rollouts of a run that has expired, and the run itself once it has none left."""
    run = db.execute(_OVER, {"before": before}).fetchone()
    if run is None:
        return 0
    groups = db.execute(_OF_RUN, (run["seq"], GROUPS_AT_ONCE)).fetchall()
    if not groups:
        for statement in _DELETE_RUN:
            db.execute(statement, (run["seq"],))
    return _empty(db, groups) or 1


def _empty(db: sqlite3.Connection, groups: Sequence[sqlite3.Row]) -> int:
    """Delete the rollouts of these groups, but keep the record that the groups existed; return how many groups."""
    for group in groups:
        values = {"run": group["run"], "number": group["number"]}
        _delete_rollouts(db, db.execute(_OF_GROUP, values).fetchall())
        db.execute(_EMPTY, (group["seq"],))
    return len(groups)


def _delete_rollouts(db: sqlite3.Connection, rows: Sequence[sqlite3.Row]) -> int:
    seqs = json.dumps([row["seq"] for row in rows])
    for statement in _DELETE_ROWS:
        db.execute(statement, (seqs,))
    db.executemany(_COUNT, [(row["state"],) for row in rows])
    return len(rows)
