"""The erasure of what rollouts contain, on a person's demand; each function runs inside one transaction, in the
database's thread.

Guarantees: what is erased is overwritten, and so is everything that the connection deletes from then on. A group that
waits for a batch is dropped if no usable sample is left in it; in a batch that is not acknowledged, the sample stays in
its place, masked and without tokens. Which batches had it is told.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace

from rollout_service.ids import BatchId
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.sqlite.lists import history

DELETED = "deleted"
"""Why a sample is masked, or a group dropped, whose content was erased."""

_ROLLOUTS = """
SELECT seq, run, group_number FROM rollouts WHERE rollout_id = :id OR rollout_id GLOB :id || '.[1-9]*'
"""
_ERASE = """
UPDATE results SET trajectory = NULL,
    result = json_remove(result, '$.turn_marks', '$.session', '$.notes', '$.program', '$.nodes')
WHERE seq = ?
"""
_DELETE_TURNS = "DELETE FROM turns WHERE rollout = ?"
_DELETE_STEPS = "DELETE FROM steps WHERE rollout = ?"
_STORE_NO_STEPS = "INSERT OR REPLACE INTO steps (rollout, number, data) VALUES (?, -1, x'')"
_GROUP = """
SELECT groups.seq, groups.run, groups.number, groups.state, samples, run_id, batches.number AS batch_number
FROM groups JOIN runs ON runs.seq = groups.run LEFT JOIN batches ON batches.seq = groups.batch
WHERE groups.run = ? AND groups.number = ?
"""
_REVISE = "UPDATE groups SET samples = ? WHERE seq = ?"
_DROP = "UPDATE groups SET state = 'dropped', reason = ?, changed_at = ? WHERE seq = ?"


def overwrite_deleted(db: sqlite3.Connection) -> None:
    """Overwrite whatever this connection deletes from now on."""
    db.execute("PRAGMA secure_delete = ON")


def erase(db: sqlite3.Connection, rollout_ids: Sequence[str], now: float) -> dict[str, str]:
    """Erase what these rollouts contain, and earlier ones of the same samples; return their batches."""
    overwrite_deleted(db)
    batches: dict[str, str] = {}
    for rollout_id in rollout_ids:
        for row in db.execute(_ROLLOUTS, {"id": rollout_id}).fetchall():
            db.execute(_ERASE, (row["seq"],))
            for statement in (_DELETE_TURNS, _DELETE_STEPS, _STORE_NO_STEPS):
                db.execute(statement, (row["seq"],))
            group = db.execute(_GROUP, (row["run"], row["group_number"])).fetchone()
            if group is None or group["samples"] is None:
                continue
            if group["batch_number"] is not None:
                batches[rollout_id] = str(BatchId(group["run_id"], group["batch_number"]))
            _mask(db, group, rollout_id, now)
    return batches


def _mask(db: sqlite3.Connection, group: sqlite3.Row, rollout_id: str, now: float) -> None:
    if group["state"] not in ("ready", "batched"):
        return
    samples = [
        replace(one, usable=False, masked_because=DELETED, reward=None, advantage=None)
        if one.rollout_id == rollout_id or one.rollout_id.startswith(f"{rollout_id}.")
        else one
        for one in run_codec.decode_samples(group["samples"])
    ]
    db.execute(_REVISE, (run_codec.encode_samples(samples), group["seq"]))
    if group["state"] == "ready" and not any(sample.usable for sample in samples):
        db.execute(_DROP, (DELETED, now, group["seq"]))
        history.write_reason(db, group["run"], group["number"], DELETED)
