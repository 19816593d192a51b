"""What is deleted for its age: each function runs inside one transaction, in the database's thread.

Guarantees: nothing that a trainer has still to acknowledge is touched, nor a rollout that has not ended; a transaction
deletes a bounded number of rows, so that others need not wait for long.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import chain

from rollout_service.store.runs_contract import RetentionPolicy

GROUPS_AT_ONCE = 64
ROLLOUTS_AT_ONCE = 512

_SETTLED = """
SELECT seq, members FROM groups
WHERE state IN ('acknowledged', 'dropped') AND pruned < 2 AND changed_at <= ? ORDER BY seq LIMIT ?
"""
_OF_RUN = "SELECT seq, members FROM groups WHERE run = ? AND pruned < 2 LIMIT ?"
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
    "DELETE FROM batches WHERE run = ?",
    "DELETE FROM tallies WHERE run = ?",
    "DELETE FROM run_tasks WHERE run = ?",
    "DELETE FROM runs WHERE seq = ?",
)
_PLAIN = """
SELECT rollout_id FROM rollouts WHERE state IN ('completed', 'failed', 'cancelled') AND changed_at <= ?
    AND NOT EXISTS (SELECT 1 FROM runs WHERE substr(rollout_id, 1, length(run_id) + 1) = run_id || '.')
LIMIT ?
"""
_ROWS = "SELECT seq, state FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))"
_DELETE_ROWS = (
    "DELETE FROM results WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM requests WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM rollouts WHERE seq IN (SELECT value FROM json_each(?))",
)
_COUNT = "UPDATE counts SET count = count - 1 WHERE state = ?"


def delete_expired(db: sqlite3.Connection, policy: RetentionPolicy, now: float) -> int:
    """Delete some of what is older than this policy allows; returns how many rows, 0 when nothing is left to delete."""
    deleted = 0
    if policy.ended_runs is not None:
        deleted += _delete_run(db, now - policy.ended_runs)
    if policy.settled_groups is not None:
        deleted += _empty(db, db.execute(_SETTLED, (now - policy.settled_groups, GROUPS_AT_ONCE)).fetchall())
    if policy.rollouts is not None:
        rows = db.execute(_PLAIN, (now - policy.rollouts, ROLLOUTS_AT_ONCE)).fetchall()
        deleted += _delete_rollouts(db, [row["rollout_id"] for row in rows])
    return deleted


def _delete_run(db: sqlite3.Connection, before: float) -> int:
    """The rollouts of a run that is over, and in the end the run itself."""
    run = db.execute(_OVER, {"before": before}).fetchone()
    if run is None:
        return 0
    groups = db.execute(_OF_RUN, (run["seq"], GROUPS_AT_ONCE)).fetchall()
    if not groups:
        for statement in _DELETE_RUN:
            db.execute(statement, (run["seq"],))
    return _empty(db, groups) or 1


def _empty(db: sqlite3.Connection, groups: Sequence[sqlite3.Row]) -> int:
    """Delete the rollouts of these groups, and keep that there were such groups."""
    members = chain.from_iterable(json.loads(group["members"]) for group in groups)
    _delete_rollouts(db, list(chain.from_iterable(map(tries, members))))
    for group in groups:
        db.execute(_EMPTY, (group["seq"],))
    return len(groups)


def tries(rollout_id: str) -> Iterator[str]:
    """A rollout of a group, and those that it was repeated for; `retry_of` of the run manager counts them."""
    yield rollout_id
    *first, retry = rollout_id.split(".")
    if len(first) == 3:
        base = ".".join(first)
        yield base
        yield from (f"{base}.{number}" for number in range(1, int(retry)))


def _delete_rollouts(db: sqlite3.Connection, rollout_ids: Sequence[str]) -> int:
    rows = db.execute(_ROWS, (json.dumps(list(rollout_ids)),)).fetchall()
    seqs = json.dumps([row["seq"] for row in rows])
    for statement in _DELETE_ROWS:
        db.execute(statement, (seqs,))
    db.executemany(_COUNT, [(row["state"],) for row in rows])
    return len(rows)
