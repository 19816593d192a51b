"""The erasure of rollouts' contents, on a person's demand, and the deletion of expired records.

Each function runs inside one transaction, in the database's thread. Erased data is overwritten, and so is everything
that the connection deletes from then on. Nothing that expires is deleted while a trainer still has to acknowledge it,
nor any rollout that has not ended. A transaction deletes a bounded number of groups or rollouts, so other jobs do not
wait for long.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from rollout_service.base.ids import BatchId, SampleId
from rollout_service.groups.filters import DELETED
from rollout_service.settings import RetentionSettings
from rollout_service.store import rules
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.sqlite import history
from rollout_service.store.sqlite.run_statements import add_to_counters, announce, finish_if_done, get

_ROLLOUTS = """
SELECT seq, rollout_id, run, group_number, result FROM rollouts LEFT JOIN results USING (seq)
WHERE run = (SELECT seq FROM runs WHERE run_id = :run) AND group_number = :number
    AND (rollout_id = :id OR rollout_id GLOB :id || '.[1-9]*')
"""
_ERASE = "UPDATE results SET trajectory = NULL, result = ? WHERE seq = ?"
_ERASE_REWARD = "UPDATE rollouts SET reward = NULL WHERE seq = ?"
_DELETE_TURNS = "DELETE FROM turns WHERE rollout = ?"
_DELETE_STEPS = "DELETE FROM steps WHERE rollout = ?"
_STORE_NO_STEPS = "INSERT OR REPLACE INTO steps (rollout, number, data) VALUES (?, -1, x'')"
_GROUP = """
SELECT groups.seq, groups.run, groups.number, groups.state, samples, run_id, batches.number AS batch_number
FROM groups JOIN runs ON runs.seq = groups.run LEFT JOIN batches ON batches.seq = groups.batch
WHERE groups.run = ? AND groups.number = ?
"""
_OPEN_OF_USER = """
SELECT rollout_id FROM groups JOIN rollouts ON rollouts.run = groups.run AND group_number = groups.number
    JOIN results ON results.seq = rollouts.seq
WHERE groups.state = 'open' AND instr(result, :user) AND result ->> '$.session.user' = :user
"""
_CLOSED_OF_USER = "SELECT samples FROM groups WHERE state <> 'open' AND instr(samples, :user)"
_REVISE = "UPDATE groups SET samples = ? WHERE seq = ?"
_DROP = "UPDATE groups SET state = 'dropped', reason = ?, changed_at = ? WHERE seq = ?"


def rollouts_of(db: sqlite3.Connection, user: str) -> list[str]:
    found = {row["rollout_id"] for row in db.execute(_OPEN_OF_USER, {"user": user})}
    for row in db.execute(_CLOSED_OF_USER, {"user": user}):
        found |= run_codec.rollouts_of(row["samples"], user)
    return rules.first_rollouts(found)


def overwrite_deleted(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA secure_delete = ON")


def erase(db: sqlite3.Connection, rollout_ids: Sequence[str], now: float) -> dict[str, str]:
    """Erase the contents of these rollouts, and of later ones of the same samples; return their batches."""
    overwrite_deleted(db)
    batches: dict[str, str] = {}
    for rollout_id in rollout_ids:
        sample = SampleId.parse(rollout_id)
        rows = db.execute(_ROLLOUTS, {"id": rollout_id, "run": sample.run, "number": sample.number}).fetchall()
        for row in rows:
            if row["result"] is not None:
                db.execute(_ERASE, (rollout_codec.erase_result(row["result"]), row["seq"]))
            for statement in (_ERASE_REWARD, _DELETE_TURNS, _DELETE_STEPS, _STORE_NO_STEPS):
                db.execute(statement, (row["seq"],))
        group = db.execute(_GROUP, (rows[0]["run"], rows[0]["group_number"])).fetchone() if rows else None
        if group is None or group["samples"] is None:
            continue
        if group["batch_number"] is not None:
            batches[rollout_id] = str(BatchId(group["run_id"], group["batch_number"]))
        _take_out(db, group, [row["rollout_id"] for row in rows], now)
    return batches


def _take_out(db: sqlite3.Connection, group: sqlite3.Row, rollout_ids: Sequence[str], now: float) -> None:
    """Remove samples from a group, as far as it can still be delivered."""
    before = run_codec.decode_samples(group["samples"])
    is_settled = group["state"] not in ("ready", "batched")
    samples = rules.without_erased(before, rollout_ids, is_settled=is_settled)
    db.execute(_REVISE, (run_codec.encode_samples(samples), group["seq"]))
    if is_settled:
        return
    add_to_counters(db, group["run"], rules.masked_counts(samples, before))
    run = get(db, group["run_id"])
    if group["state"] == "ready" and not rules.is_worth_keeping(samples, run.request):
        db.execute(_DROP, (DELETED, now, group["seq"]))
        history.write_reason(db, group["run"], group["number"], DELETED)
        finish_if_done(db, group["run_id"], now)
    announce(db, group["run_id"], now)


GROUPS_AT_ONCE = 64
ROLLOUTS_AT_ONCE = 512

_SETTLED = """
SELECT seq, run, number FROM groups INDEXED BY settled_with_rollouts
WHERE state IN ('acknowledged', 'dropped') AND pruned < 2 AND changed_at <= ? ORDER BY changed_at LIMIT ?
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
SELECT seq, state FROM rollouts INDEXED BY ended_of_no_run
WHERE run IS NULL AND state IN ('completed', 'failed', 'cancelled') AND changed_at <= ? LIMIT ?
"""
_OF_GROUP = "SELECT seq, state FROM rollouts WHERE run = :run AND group_number = :number"
_DELETE_ROWS = (
    "DELETE FROM steps WHERE rollout IN (SELECT value FROM json_each(?))",
    "DELETE FROM results WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM requests WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM branches WHERE seq IN (SELECT value FROM json_each(?))",
    "DELETE FROM rollouts WHERE seq IN (SELECT value FROM json_each(?))",
)
_COUNT = "UPDATE counts SET count = count - 1 WHERE state = ?"


def delete_expired(db: sqlite3.Connection, now: float, keep: RetentionSettings) -> int:
    deleted = 0
    if keep.ended_run_seconds is not None:
        deleted += _delete_run(db, now - keep.ended_run_seconds)
    if keep.settled_group_seconds is not None:
        deleted += _empty(db, db.execute(_SETTLED, (now - keep.settled_group_seconds, GROUPS_AT_ONCE)).fetchall())
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
