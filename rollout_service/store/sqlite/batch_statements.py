"""The statements on batches: each function runs inside one transaction, in the database's thread."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence

from api_schemas.runs import RunState, Surplus
from rollout_service.errors import ConflictError, NotFoundError
from rollout_service.groups import STALE
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    NoBatch,
    OpenGroup,
    RunRecord,
)
from rollout_service.store.sqlite import run_statements
from rollout_service.store.sqlite.run_statements import (
    add_to_counter,
    cancel_groups,
    finish_if_done,
    record_of,
    row_of,
)

_HELD = (
    "SELECT * FROM batches WHERE run = :run AND state = 'leased' AND lease_key = :key AND lease_until > :now"
)
_FREE = """
SELECT * FROM batches WHERE run = :run AND (state = 'returned' OR (state = 'leased' AND lease_until <= :now))
ORDER BY number LIMIT 1
"""
_DUE = "SELECT min(lease_until) AS due FROM batches WHERE run = ? AND state = 'leased'"
_GROUPS = "SELECT number FROM groups WHERE batch = ? ORDER BY number"
_STALE_IN_BATCH = "SELECT count(*) FROM groups WHERE batch = ? AND oldest_version < ?"
_FREE_OF_BATCH = "UPDATE groups SET state = 'ready', batch = NULL, changed_at = :now WHERE batch = :batch"
_STALE_READY = "SELECT EXISTS (SELECT 1 FROM groups WHERE run = ? AND state = 'ready' AND oldest_version < ?)"
_RETURNED = "SELECT * FROM batches WHERE run = ? AND state = 'returned'"
_DROP_SURPLUS = """
UPDATE groups SET state = 'dropped', reason = 'surplus', changed_at = :now WHERE run = :run AND state = 'ready'
"""
_READY = "SELECT seq FROM groups WHERE run = ? AND state = 'ready' ORDER BY number LIMIT ?"
_NEW = """
INSERT INTO batches (run, number, state, lease_key, lease_until, deliveries, version, dropped, changed_at)
VALUES (:run, :number, 'leased', :key, :until, 1, :version, :dropped, :now) RETURNING *
"""
_TAKE = """
UPDATE groups SET state = 'batched', batch = :batch, changed_at = :now
WHERE seq IN (SELECT value FROM json_each(:groups))
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


def lease(db: sqlite3.Connection, order: BatchLeaseRequest, now: float) -> BatchLease | NoBatch:
    """A batch for this consumer: the one it holds already, one that is free again, or a new one."""
    row = row_of(db, order.run_id)
    run = record_of(db, row)
    held = db.execute(_HELD, {"run": row["seq"], "key": order.key, "now": now}).fetchone()
    if held is not None:
        (again,) = db.execute(_EXTEND, {"batch": held["seq"], "until": now + order.seconds}).fetchall()
        return _batch(db, again, order.run_id)
    bound = None if order.allow_stale else oldest_allowed(run)
    while free := db.execute(_FREE, {"run": row["seq"], "now": now}).fetchone():
        if bound is not None and _dissolve_if_stale(db, free, bound, now):
            continue
        values = {"batch": free["seq"], "key": order.key, "until": now + order.seconds}
        (again,) = db.execute(_LEASE_AGAIN, values | {"version": run.version, "now": now}).fetchall()
        return _batch(db, again, order.run_id)
    return _new_batch(db, row, order, bound, now)


def oldest_allowed(run: RunRecord) -> int | None:
    """The oldest version that a token of a batch may have; None when the run does not look."""
    eta = run.request.max_staleness
    return None if eta is None else run.version - eta


def _dissolve_if_stale(db: sqlite3.Connection, batch: sqlite3.Row, bound: int, now: float) -> bool:
    (stale,) = db.execute(_STALE_IN_BATCH, (batch["seq"], bound)).fetchone()
    if not stale:
        return False
    values = {"batch": batch["seq"], "now": now}
    db.execute(_FREE_OF_BATCH, values)
    db.execute(_SETTLE, values | {"state": "dissolved"})
    return True


def stale_groups(db: sqlite3.Connection, run_id: str, bound: int, now: float) -> list[OpenGroup]:
    """The groups that wait with samples older than this version, also those of batches that were returned."""
    run = row_of(db, run_id)["seq"]
    for batch in db.execute(_RETURNED, (run,)).fetchall():
        _dissolve_if_stale(db, batch, bound, now)
    return run_statements.stale_groups(db, run, bound)


def _new_batch(
    db: sqlite3.Connection, row: sqlite3.Row, order: BatchLeaseRequest, bound: int | None, now: float
) -> BatchLease | NoBatch:
    if bound is not None and db.execute(_STALE_READY, (row["seq"], bound)).fetchone()[0]:
        return NoBatch(over=False, due=math.inf, stale=True)
    run = record_of(db, row_of(db, order.run_id))
    size = run.request.batch_size
    groups = [ready["seq"] for ready in db.execute(_READY, (row["seq"], size))]
    last = run.exhausted and not run.count("open")
    if not groups or (len(groups) < size and not last):
        over = run.state is RunState.FINISHED or (last and not groups and not run.count("batched"))
        (due,) = db.execute(_DUE, (row["seq"],)).fetchone()
        return NoBatch(over=over, due=math.inf if due is None else due)
    dropped = dropped_counts(run.counters)
    values = {
        "run": row["seq"],
        "number": row["batches"],
        "key": order.key,
        "until": now + order.seconds,
        "version": run.version,
        "dropped": json.dumps(since(json.loads(row["reported"]), dropped)),
        "now": now,
    }
    (made,) = db.execute(_NEW, values).fetchall()
    db.execute(_TAKE, {"batch": made["seq"], "groups": json.dumps(groups), "now": now})
    db.execute(_COUNT_BATCH, {"run": row["seq"], "reported": json.dumps(dropped)})
    if run.request.surplus is Surplus.CANCEL:
        db.execute(_DROP_SURPLUS, {"run": row["seq"], "now": now})
        cancel_groups(db, row["seq"], "surplus")
    return _batch(db, made, order.run_id)


def dropped_counts(counters: Mapping[str, int]) -> dict[str, int]:
    """Dropped groups by reason."""
    prefix = "dropped:"
    return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)}


def since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What was added to counts, without zeros."""
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


def _batch(db: sqlite3.Connection, row: sqlite3.Row, run_id: str) -> BatchLease:
    groups = [group["number"] for group in db.execute(_GROUPS, (row["seq"],))]
    return run_codec.decode_batch(row, run_id, groups)


def acknowledge(db: sqlite3.Connection, run_id: str, number: int, now: float) -> None:
    """Settle a batch for good; again changes nothing."""
    row, batch = row_of(db, run_id), _row(db, run_id, number)
    if batch["state"] == "acknowledged":
        return
    if batch["state"] == "dissolved":
        raise ConflictError(
            f"the batch {run_codec.batch_id(run_id, number)} was dissolved: its lease had run out or been "
            "given back, and a group of it had grown too old",
            hint="Do not count it as trained; acknowledge within the lease, or lease for longer.",
        )
    db.execute(_SETTLE, {"batch": batch["seq"], "state": "acknowledged", "now": now})
    db.execute(_ACKNOWLEDGE_GROUPS, {"batch": batch["seq"], "now": now})
    add_to_counter(db, row["seq"], "batches:acknowledged")
    finish_if_done(db, row["seq"], now)


def renew(db: sqlite3.Connection, run_id: str, number: int, key: str | None, until: float) -> None:
    """Put off the end of a lease."""
    batch = _row(db, run_id, number)
    if batch["state"] != "leased" or key not in (None, batch["lease_key"]):
        why = "leased by another" if batch["state"] == "leased" else batch["state"]
        raise ConflictError(
            f"the batch {run_codec.batch_id(run_id, number)} is {why}",
            hint="Its lease ran out or was given back: do not count it as trained unless it is acknowledged.",
        )
    db.execute(_EXTEND, {"batch": batch["seq"], "until": until}).fetchall()


def give_back(db: sqlite3.Connection, run_id: str, number: int, now: float) -> None:
    """Return a batch to be leased again at once; what was returned or dissolved is there already."""
    batch = _row(db, run_id, number)
    if batch["state"] == "acknowledged":
        raise ConflictError(
            f"the batch {run_codec.batch_id(run_id, number)} is acknowledged",
            hint="What was acknowledged never comes again.",
        )
    if batch["state"] == "leased":
        db.execute(_SETTLE, {"batch": batch["seq"], "state": "returned", "now": now})


def _row(db: sqlite3.Connection, run_id: str, number: int) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(_BATCH, (row_of(db, run_id)["seq"], number)).fetchone()
    if row is None:
        raise NotFoundError(
            f"there is no batch {run_codec.batch_id(run_id, number)}",
            hint="A batch's id comes with its lease.",
        )
    return row


def read_group(db: sqlite3.Connection, run_id: str, number: int) -> tuple[sqlite3.Row, list[sqlite3.Row]]:
    """The row of a closed group and those of its rollouts with results; decoding is for another thread."""
    row = _closed_group(db, run_id, number)
    samples = run_codec.decode_samples(row["samples"])
    return row, read_rollouts(db, [sample.rollout_id for sample in samples])


def _closed_group(db: sqlite3.Connection, run_id: str, number: int) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(_CLOSED_GROUP, (run_id, number)).fetchone()
    if row is None:
        raise NotFoundError(f"the run {run_id} has no finished group {number}")
    return row


def read_closing(
    db: sqlite3.Connection, run_id: str, closure: GroupClosure
) -> tuple[sqlite3.Row | None, list[sqlite3.Row]]:
    """Return the row that a group will have once it is closed, if it can be, and the rows of its rollouts."""
    values = {
        "run": run_id,
        "number": closure.number,
        "samples": run_codec.encode_samples(closure.samples),
        "summary": run_codec.encode_summary(closure),
    }
    row = db.execute(_CLOSING, values).fetchone()
    return row, read_rollouts(db, [sample.rollout_id for sample in closure.samples])


def read_heads(db: sqlite3.Connection, run_id: str, numbers: Sequence[int]) -> list[sqlite3.Row]:
    """Return the rows of closed groups joined with their heads, in this order."""
    rows = {row["number"]: row for row in db.execute(_HEADS, (run_id, json.dumps(list(numbers))))}
    for number in numbers:
        if number not in rows:
            raise NotFoundError(f"the run {run_id} has no finished group {number}")
    return [rows[number] for number in numbers]


def read_trajectories(db: sqlite3.Connection, run_id: str, number: int) -> list[bytes]:
    """Return the packed trajectories of a closed group, in its order, without those that are too old."""
    samples = run_codec.decode_samples(_closed_group(db, run_id, number)["samples"])
    kept = [sample.rollout_id for sample in samples if sample.masked_because != STALE]
    found = {row["rollout_id"]: row["trajectory"] for row in db.execute(_TRAJECTORIES, (json.dumps(kept),))}
    return [found[one] for one in kept if found.get(one) is not None]


def read_rollouts(db: sqlite3.Connection, rollout_ids: Sequence[str]) -> list[sqlite3.Row]:
    """The rows of these rollouts with their requests and results."""
    return db.execute(_GROUP_ROLLOUTS, (json.dumps(list(rollout_ids)),)).fetchall()


def closed_groups(db: sqlite3.Connection, run_id: str) -> list[int]:
    """The numbers of the closed groups of a run."""
    return [row["number"] for row in db.execute(_CLOSED_GROUPS, (row_of(db, run_id)["seq"],))]


def rollout_ids(db: sqlite3.Connection, run_id: str) -> list[str]:
    """The rollouts of the closed groups of a run."""
    return [row["id"] for row in db.execute(_ROLLOUT_IDS, (row_of(db, run_id)["seq"],))]
