"""The statements on batches; each function runs inside one transaction, in the database's thread.

A function with the name of a method of `RunStore` does what that promises.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from datetime import datetime

from rollout_service.base.ids import BatchId
from rollout_service.groups.filters import SURPLUS
from rollout_service.store import rules
from rollout_service.store.base import unknown_batch, unknown_group
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.rollouts import when
from rollout_service.store.rules import BatchState
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    NoBatch,
    OpenGroup,
    ReadyGroup,
    RunRecord,
)
from rollout_service.store.sqlite import history, run_statements
from rollout_service.store.sqlite.run_statements import (
    add_to_counters,
    cancel_groups,
    finish_if_done,
    record_of,
    row_of,
)

_HELD = "SELECT * FROM batches WHERE run = :run AND state = 'leased' AND lease_key = :key AND lease_until > :now"
_FREE = """
SELECT * FROM batches WHERE run = :run AND (state = 'returned' OR (state = 'leased' AND lease_until <= :now))
ORDER BY number LIMIT 1
"""
_DUE = "SELECT min(lease_until) AS due FROM batches WHERE run = ? AND state = 'leased'"
_GROUPS = "SELECT number FROM groups WHERE batch = ? ORDER BY number"
_OLDEST_IN_BATCH = "SELECT min(oldest_version) FROM groups WHERE batch = ?"
_FREE_OF_BATCH = "UPDATE groups SET state = 'ready', batch = NULL, changed_at = :now WHERE batch = :batch"
_RETURNED = "SELECT * FROM batches WHERE run = ? AND state = 'returned'"
_DROP_SURPLUS = """
UPDATE groups SET state = 'dropped', reason = 'surplus', changed_at = :now
WHERE run = :run AND number IN (SELECT value FROM json_each(:groups))
"""
_READY = "SELECT number, oldest_version, samples FROM groups WHERE run = ? AND state = 'ready' ORDER BY number"
_NEW = """
INSERT INTO batches (run, number, state, lease_key, lease_until, deliveries, version, dropped, changed_at)
VALUES (:run, :number, 'leased', :key, :until, 1, :version, :dropped, :now) RETURNING *
"""
_TAKE = """
UPDATE groups SET state = 'batched', batch = :batch, changed_at = :now
WHERE run = :run AND number IN (SELECT value FROM json_each(:groups))
"""
_COUNT_BATCH = "UPDATE runs SET batches = batches + 1, reported = :reported WHERE seq = :run"
_LEASE_AGAIN = """
UPDATE batches SET state = 'leased', lease_key = :key, lease_until = :until, deliveries = deliveries + 1,
    version = :version, changed_at = :now
WHERE seq = :batch RETURNING *
"""
_EXTEND = "UPDATE batches SET lease_until = :until WHERE seq = :batch RETURNING *"
_SETTLE = "UPDATE batches SET state = :state, lease_until = 0, changed_at = :now WHERE seq = :batch"
_ACKNOWLEDGE_GROUPS = "UPDATE groups SET state = 'acknowledged', changed_at = :now WHERE batch = :batch"
_CLOSED_GROUP = """
SELECT groups.*, run_id, batches.number AS batch_number
FROM groups JOIN runs ON runs.seq = groups.run LEFT JOIN batches ON batches.seq = groups.batch
WHERE run_id = ? AND groups.number = ? AND groups.state <> 'open' AND groups.pruned < 2
"""
_CLOSED_GROUPS = "SELECT number FROM groups WHERE run = ? AND state <> 'open' AND pruned < 2 ORDER BY number"
_ROLLOUT_IDS = """
SELECT sample.value ->> 'rollout_id' AS id FROM groups, json_each(groups.samples) AS sample
WHERE run = ? AND state <> 'open' ORDER BY number, sample.key
"""
_GROUP_ROLLOUTS = """
SELECT rollouts.*, request, result, trajectory, oldest_version, newest_version
FROM rollouts JOIN requests USING (seq) LEFT JOIN results USING (seq)
WHERE rollout_id IN (SELECT value FROM json_each(?))
"""
_CLOSING = """
SELECT run_id, number, epoch, :samples AS samples, :summary AS summary
FROM groups JOIN runs ON runs.seq = groups.run
WHERE run_id = :run AND number = :number AND groups.state IN ('open', 'ready')
"""
_HEADS = """
SELECT number, samples, summary, form, tokens, json
FROM groups JOIN runs ON runs.seq = groups.run LEFT JOIN group_heads ON group_heads.seq = groups.seq
WHERE run_id = ? AND number IN (SELECT value FROM json_each(?)) AND groups.state <> 'open' AND pruned < 2
"""
_TRAJECTORIES = """
SELECT rollout_id, trajectory FROM rollouts JOIN results USING (seq)
WHERE rollout_id IN (SELECT value FROM json_each(?))
"""
_BATCH = "SELECT * FROM batches WHERE run = ? AND number = ?"


def lease(db: sqlite3.Connection, request: BatchLeaseRequest, now: float) -> BatchLease | NoBatch:
    """Lease the batch that this consumer holds already, one that is free again, or a new one."""
    row = row_of(db, request.run_id)
    run = record_of(db, row)
    held = db.execute(_HELD, {"run": row["seq"], "key": request.key, "now": now}).fetchone()
    if held is not None:
        (again,) = db.execute(_EXTEND, {"batch": held["seq"], "until": now + request.seconds}).fetchall()
        return _batch(db, again, request.run_id)
    bound = None if request.allow_stale else rules.oldest_allowed(run)
    while free := db.execute(_FREE, {"run": row["seq"], "now": now}).fetchone():
        if _dissolve_if_stale(db, free, bound, now):
            continue
        values = {"batch": free["seq"], "key": request.key, "until": now + request.seconds}
        (again,) = db.execute(_LEASE_AGAIN, values | {"version": run.version, "now": now}).fetchall()
        return _batch(db, again, request.run_id)
    return _new_batch(db, request, bound, now)


def _dissolve_if_stale(db: sqlite3.Connection, batch: sqlite3.Row, bound: int | None, now: float) -> bool:
    (oldest,) = db.execute(_OLDEST_IN_BATCH, (batch["seq"],)).fetchone()
    if not rules.is_stale(oldest, bound):
        return False
    values = {"batch": batch["seq"], "now": now}
    db.execute(_FREE_OF_BATCH, values)
    db.execute(_SETTLE, values | {"state": BatchState.DISSOLVED})
    return True


def stale_groups(db: sqlite3.Connection, now: float, run_id: str, bound: int) -> list[OpenGroup]:
    """Return the ready groups with samples older than this version, after dissolving returned batches with such."""
    run = row_of(db, run_id)["seq"]
    for batch in db.execute(_RETURNED, (run,)).fetchall():
        _dissolve_if_stale(db, batch, bound, now)
    return run_statements.stale_groups(db, run, bound, now)


def _new_batch(
    db: sqlite3.Connection, request: BatchLeaseRequest, bound: int | None, now: float
) -> BatchLease | NoBatch:
    row = row_of(db, request.run_id)
    run = record_of(db, row)  # dissolved batches have changed its counters
    ready = _ready(db, row["seq"], run)
    (due,) = db.execute(_DUE, (row["seq"],)).fetchone()
    decision = rules.next_batch(run, ready, bound=bound, due_in=math.inf if due is None else due - now)
    if isinstance(decision, NoBatch):
        return decision
    dropped = rules.dropped_counts(run.counters)
    of_run = {"run": row["seq"], "now": now}
    values = of_run | {
        "number": row["batches"],
        "key": request.key,
        "until": now + request.seconds,
        "version": run.version,
        "dropped": json.dumps(rules.added_counts(json.loads(row["reported"]), dropped)),
    }
    (made,) = db.execute(_NEW, values).fetchall()
    db.execute(_TAKE, of_run | {"batch": made["seq"], "groups": json.dumps(decision.groups)})
    db.execute(_COUNT_BATCH, {"run": row["seq"], "reported": json.dumps(dropped)})
    if decision.surplus:
        db.execute(_DROP_SURPLUS, of_run | {"groups": json.dumps(decision.surplus)})
        for number in decision.surplus:
            history.write_reason(db, row["seq"], number, SURPLUS)
    if decision.cancels_open:
        cancel_groups(db, request.run_id, SURPLUS)
    return _batch(db, made, request.run_id)


def ready_groups(db: sqlite3.Connection, run_id: str) -> list[ReadyGroup]:
    row = row_of(db, run_id)
    return _ready(db, row["seq"], record_of(db, row))


def _ready(db: sqlite3.Connection, seq: int, run: RunRecord) -> list[ReadyGroup]:
    is_live = run.request.live is not None
    return [
        ReadyGroup(row["number"], row["oldest_version"], run_codec.owners_of(row["samples"]) if is_live else ())
        for row in db.execute(_READY, (seq,))
    ]


def _batch(db: sqlite3.Connection, row: sqlite3.Row, run_id: str) -> BatchLease:
    groups = [group["number"] for group in db.execute(_GROUPS, (row["seq"],))]
    return run_codec.decode_batch(row, run_id, groups)


def acknowledge(db: sqlite3.Connection, now: float, run_id: str, batch: int) -> None:
    run, row = row_of(db, run_id)["seq"], _row(db, run_id, batch)
    if not rules.check_acknowledge(str(BatchId(run_id, batch)), BatchState(row["state"])):
        return
    db.execute(_SETTLE, {"batch": row["seq"], "state": BatchState.ACKNOWLEDGED, "now": now})
    db.execute(_ACKNOWLEDGE_GROUPS, {"batch": row["seq"], "now": now})
    add_to_counters(db, run, {"batches:acknowledged": 1})
    finish_if_done(db, run_id, now)


def renew_batch(
    db: sqlite3.Connection, now: float, run_id: str, batch: int, *, key: str | None, seconds: float
) -> datetime:
    row, until = _row(db, run_id, batch), now + seconds
    name, state = str(BatchId(run_id, batch)), BatchState(row["state"])
    rules.check_renewal(name, state, holder=row["lease_key"], key=key)
    db.execute(_EXTEND, {"batch": row["seq"], "until": until}).fetchall()
    return when(until)


def give_back(db: sqlite3.Connection, now: float, run_id: str, batch: int, *, key: str | None = None) -> None:
    row = _row(db, run_id, batch)
    name, state = str(BatchId(run_id, batch)), BatchState(row["state"])
    if rules.check_return(name, state, holder=row["lease_key"], key=key):
        db.execute(_SETTLE, {"batch": row["seq"], "state": BatchState.RETURNED, "now": now})


def _row(db: sqlite3.Connection, run_id: str, number: int) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(_BATCH, (row_of(db, run_id)["seq"], number)).fetchone()
    if row is None:
        raise unknown_batch(run_id, number)
    return row


def read_group(db: sqlite3.Connection, run_id: str, number: int) -> tuple[sqlite3.Row, list[sqlite3.Row]]:
    """Return the row of a closed group, and those of its rollouts, to be decoded in another thread."""
    row = _closed_group(db, run_id, number)
    samples = run_codec.decode_samples(row["samples"])
    return row, read_rollouts(db, [sample.rollout_id for sample in samples])


def _closed_group(db: sqlite3.Connection, run_id: str, number: int) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(_CLOSED_GROUP, (run_id, number)).fetchone()
    if row is None:
        raise unknown_group(run_id, number)
    return row


def read_closing(
    db: sqlite3.Connection, run_id: str, closure: GroupClosure
) -> tuple[sqlite3.Row | None, list[sqlite3.Row]]:
    """Return the row that the group will have once it is closed, None if it cannot be."""
    values = {
        "run": run_id,
        "number": closure.number,
        "samples": run_codec.encode_samples(closure.samples),
        "summary": run_codec.encode_summary(closure),
    }
    row = db.execute(_CLOSING, values).fetchone()
    return row, read_rollouts(db, [sample.rollout_id for sample in closure.samples])


def read_heads(db: sqlite3.Connection, run_id: str, numbers: Sequence[int]) -> list[sqlite3.Row]:
    """Return the rows of closed groups, joined with their heads, in this order."""
    rows = {row["number"]: row for row in db.execute(_HEADS, (run_id, json.dumps(list(numbers))))}
    for number in numbers:
        if number not in rows:
            raise unknown_group(run_id, number)
    return [rows[number] for number in numbers]


def read_trajectories(db: sqlite3.Connection, run_id: str, number: int) -> list[bytes]:
    """Return the encoded trajectories of a closed group in the order of its samples, without stale ones."""
    samples = run_codec.decode_samples(_closed_group(db, run_id, number)["samples"])
    kept = rules.delivered_rollouts(samples)
    found = {row["rollout_id"]: row["trajectory"] for row in db.execute(_TRAJECTORIES, (json.dumps(kept),))}
    return [found[one] for one in kept if found.get(one) is not None]


def read_rollouts(db: sqlite3.Connection, rollout_ids: Sequence[str]) -> list[sqlite3.Row]:
    return db.execute(_GROUP_ROLLOUTS, (json.dumps(list(rollout_ids)),)).fetchall()


def closed_groups(db: sqlite3.Connection, run_id: str) -> list[int]:
    return [row["number"] for row in db.execute(_CLOSED_GROUPS, (row_of(db, run_id)["seq"],))]


def rollout_ids(db: sqlite3.Connection, run_id: str) -> list[str]:
    return [row["id"] for row in db.execute(_ROLLOUT_IDS, (row_of(db, run_id)["seq"],))]
