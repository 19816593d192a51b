"""The statements on rollouts, their turns and their steps; each runs inside one transaction, in the database's thread.

A statement on a lease takes effect only while the lease is held, that is, while the row has its owner and token. Its
parameters are `id`, `owner`, `token` and `now` (Unix seconds).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from rollout_service.base.errors import RecordLostError, describe
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec.record import fingerprint, id_taken
from rollout_service.store.codec.summaries import NO_FIGURES
from rollout_service.store.contract import MAX_RECORDS, EncodedSteps, Lease, UnsavedTurn

_SUBMIT = """
INSERT INTO rollouts (rollout_id, fingerprint, pool, environment, run, group_number, state, stop_reason,
    created_at, queued_at, changed_at)
SELECT :id, :fingerprint, :pool, :environment, :run, :group_number,
    iif(dead, 'cancelled', 'queued'), iif(dead, 'cancelled', NULL),
    :now, :now, :now
FROM (SELECT EXISTS (SELECT 1 FROM tombstones WHERE rollout_id = :id) AS dead)
WHERE true
ON CONFLICT (rollout_id) DO NOTHING
RETURNING seq, state
"""
_ADD_REQUEST = "INSERT INTO requests (seq, request) VALUES (?, ?)"
_ADD_BRANCH = "INSERT INTO branches (seq, branch_of) VALUES (?, ?)"
_DROP_TOMBSTONE = "DELETE FROM tombstones WHERE rollout_id = :id"

_END_CANCELLED = """
UPDATE rollouts SET state = 'cancelled', stop_reason = 'cancelled', owner = NULL, changed_at = :now
WHERE owner IS NOT NULL AND owner != :owner AND lease_until <= :now AND cancel
RETURNING rollout_id
"""
_IN_POOLS = "(:pools IS NULL OR pool IN (SELECT value FROM json_each(:pools)))"
# The sign keeps SQLite from choosing the index on environments, which has all rollouts and not only those that wait.
_SUITS = f"{_IN_POOLS} AND +environment IN (SELECT key FROM json_each(:waits))"  # noqa: S608
_SUITS_AT = "max(not_before, queued_at + (SELECT value FROM json_each(:waits) WHERE key = environment))"


def _claim(suits: str, due: str) -> str:
    """Return the statement that leases rollouts for which `suits` holds, once the time `due` has come."""
    return f"""
UPDATE rollouts SET
    state = 'queued', token = token + 1, owner = :owner, code = NULL,
    queued_at = iif(owner IS NULL, queued_at, lease_until), lease_until = :until, changed_at = :now
WHERE seq IN (
    SELECT seq FROM (
        SELECT * FROM (
            SELECT seq FROM rollouts WHERE state = 'queued' AND owner IS NULL AND {suits} AND {due} <= :now
            ORDER BY seq LIMIT :limit
        )
        UNION ALL
        SELECT seq FROM rollouts WHERE owner IS NOT NULL AND owner != :owner AND lease_until <= :now AND {suits}
    ) ORDER BY seq LIMIT :limit
)
RETURNING *, (SELECT request FROM requests WHERE requests.seq = rollouts.seq) AS request,
    (SELECT count(*) FROM turns WHERE turns.rollout = rollouts.seq) AS saved_turns,
    (SELECT run_id FROM runs WHERE runs.seq = rollouts.run) AS run_id
"""  # noqa: S608 - made of constants


def _due(suits: str, due: str) -> str:
    """Return the statement that tells when there is something to lease."""
    return f"""
SELECT min(
    coalesce((SELECT min({due}) FROM rollouts WHERE state = 'queued' AND owner IS NULL AND {suits}), 9e99),
    coalesce((SELECT min(lease_until) FROM rollouts WHERE owner IS NOT NULL AND owner != :owner AND {suits}), 9e99)
)
"""  # noqa: S608 - made of constants


_CLAIM, _DUE = _claim(_IN_POOLS, "not_before"), _due(_IN_POOLS, "not_before")
_CLAIM_SUITED, _DUE_SUITED = _claim(_SUITS, _SUITS_AT), _due(_SUITS, _SUITS_AT)
RENEW = """
UPDATE rollouts SET lease_until = :until
WHERE owner = :owner AND rollout_id IN (SELECT value FROM json_each(:ids))
RETURNING rollout_id
"""
RECOVER = """
UPDATE rollouts SET
    state = iif(cancel, 'cancelled', 'queued'), stop_reason = iif(cancel, 'cancelled', NULL),
    owner = NULL, queued_at = :now, changed_at = :now
WHERE owner IS NOT NULL AND owner != :owner
RETURNING rollout_id, state
"""
RELEASE = """
UPDATE rollouts SET
    state = iif(cancel, 'cancelled', 'queued'), stop_reason = iif(cancel, 'cancelled', NULL),
    owner = NULL, attempt = attempt - (state != 'queued'), queued_at = :now, changed_at = :now
WHERE owner = :owner AND (:ids IS NULL OR rollout_id IN (SELECT value FROM json_each(:ids)))
RETURNING rollout_id, state
"""
HELD = "SELECT rollout_id, token FROM rollouts WHERE owner = :owner"
_ADVANCE = """
UPDATE rollouts SET state = :state, attempt = attempt + (state = 'queued'), changed_at = :now
WHERE rollout_id = :id AND owner = :owner AND token = :token
    AND state IN (SELECT value FROM json_each(:before))
"""
_HELD_STATE = "SELECT state FROM rollouts WHERE rollout_id = :id AND owner = :owner AND token = :token"
RETRY = """
UPDATE rollouts SET
    state = iif(cancel, 'cancelled', 'queued'), stop_reason = iif(cancel, 'cancelled', NULL),
    code = iif(cancel, NULL, :code), owner = NULL, not_before = :not_before,
    attempt = attempt + (state = 'queued'), retries = json_insert(retries, '$[#]', json(:error)), spans = :spans,
    queued_at = :now, changed_at = :now
WHERE rollout_id = :id AND owner = :owner AND token = :token
RETURNING rollout_id, state
"""
_FINISH = """
UPDATE rollouts SET
    state = :state, reward = :reward, stop_reason = :stop_reason, code = :code,
    turns = :turns, tokens = :tokens, worked = :worked, owner = NULL, changed_at = :now
WHERE rollout_id = :id AND owner = :owner AND token = :token
RETURNING seq
"""
_ADD_RESULT = """
INSERT INTO results (seq, result, trajectory, oldest_version, newest_version)
VALUES (:seq, :result, :trajectory, :oldest_version, :newest_version)
"""

_STATE_AND_OWNER = "SELECT state, owner, cancel, changed_at FROM rollouts WHERE rollout_id = :id"
_ADD_TOMBSTONE = "INSERT INTO tombstones (rollout_id) VALUES (:id) ON CONFLICT DO NOTHING"
_CANCEL_NOW = """
UPDATE rollouts SET state = 'cancelled', stop_reason = 'cancelled', code = NULL, changed_at = :now
WHERE rollout_id = :id
"""
_CANCEL_LATER = "UPDATE rollouts SET cancel = 1, changed_at = :now WHERE rollout_id = :id"
_UNMOVED = "UPDATE rollouts SET changed_at = :before WHERE rollout_id = :id"
CANCEL_REQUESTED = "SELECT rollout_id FROM rollouts WHERE owner = ? AND cancel"

_ROLLOUT = """
SELECT rollouts.*, request, result
FROM rollouts JOIN requests USING (seq) LEFT JOIN results USING (seq)
"""
_GET = f"{_ROLLOUT} WHERE rollout_id = ?"
_PAGE = f"{_ROLLOUT} WHERE seq > :after ORDER BY seq LIMIT :limit"
_PAGE_IN_STATE = f"{_ROLLOUT} WHERE state = :state AND seq > :after ORDER BY seq LIMIT :limit"
TRAJECTORY = "SELECT trajectory FROM results JOIN rollouts USING (seq) WHERE rollout_id = ?"
_TREE = """
SELECT rollout_id, result, iif(:with_trajectories, trajectory, NULL) AS trajectory
FROM rollouts JOIN results USING (seq) WHERE rollout_id = :id
"""
_COUNTS = "SELECT state, count FROM counts WHERE count > 0"

RECORD = "INSERT INTO events (time, kind, subject, data) VALUES (:now, :kind, :subject, :data)"
EVENTS = "SELECT * FROM events WHERE event_id > ? ORDER BY event_id LIMIT ?"


def submission(
    request: RolloutRequest, now: float, *, run: int | None = None, group_number: int | None = None
) -> dict[str, Any]:
    """`run` and `group_number` are those of the group that the rollout belongs to."""
    if request.rollout_id is None:
        raise ValueError("set the request's rollout_id before submitting it")
    return {
        "id": request.rollout_id,
        "fingerprint": fingerprint(request),
        "pool": request.pool,
        "environment": request.task.environment,
        "run": run,
        "group_number": group_number,
        "request": request.model_dump_json(),
        "branch_of": request.branch_of and request.branch_of.model_dump_json(),
        "now": now,
    }


def submit(db: sqlite3.Connection, values: dict[str, Any]) -> tuple[Rollout, bool]:
    added = db.execute(_SUBMIT, values).fetchall()
    if added:
        db.execute(_ADD_REQUEST, (added[0]["seq"], values["request"]))
        if values["branch_of"] is not None:
            db.execute(_ADD_BRANCH, (added[0]["seq"], values["branch_of"]))
        if added[0]["state"] == RolloutState.CANCELLED:
            db.execute(_DROP_TOMBSTONE, values)
    row = db.execute(_GET, (values["id"],)).fetchone()
    if row["fingerprint"] != values["fingerprint"]:
        raise id_taken("rollout", values["id"])
    return codec.decode_rollout(row), bool(added)


def claim(db: sqlite3.Connection, values: dict[str, Any]) -> tuple[list[Lease], list[str], float]:
    """Lease rollouts; return the leases, the rollouts that ended instead, and when there may be more, in Unix seconds.

    A rollout whose record is damaged ends as failed, so it keeps no other from starting.
    """
    ended = [row["rollout_id"] for row in db.execute(_END_CANCELLED, values).fetchall()]
    any_environment = values["waits"] is None
    claim, next_due = (_CLAIM, _DUE) if any_environment else (_CLAIM_SUITED, _DUE_SUITED)
    rows = sorted(db.execute(claim, values).fetchall(), key=lambda row: row["seq"])
    (due,) = db.execute(next_due, values).fetchone()
    leases = []
    for row in rows:
        try:
            leases.append(codec.decode_lease(row))
        except RecordLostError as error:
            _fail_damaged(db, row, error, values["now"])
            ended.append(row["rollout_id"])
            due = values["now"]  # there may be more in its place
    return leases, ended, due


def _fail_damaged(db: sqlite3.Connection, row: sqlite3.Row, error: RecordLostError, now: float) -> None:
    lost = describe(error)
    values = {
        "id": row["rollout_id"],
        "owner": row["owner"],
        "token": row["token"],
        "now": now,
        "state": RolloutState.FAILED,
        "reward": None,
        "stop_reason": None,
        "code": lost.code,
        "result": codec.encode_failure(lost),
        "trajectory": None,
    }
    finish(db, {**values, **codec.version_range(None), **NO_FIGURES})


def advance(db: sqlite3.Connection, values: dict[str, Any]) -> bool:
    """Record a stage; return whether the lease is held."""
    if db.execute(_ADVANCE, values).rowcount:
        return True
    held = db.execute(_HELD_STATE, values).fetchone()
    if held is not None:
        raise ValueError(f"{values['id']} cannot go back from {held['state']} to {values['state']}")
    return False


def finish(db: sqlite3.Connection, values: dict[str, Any]) -> bool:
    ended = db.execute(_FINISH, values).fetchall()
    if ended:
        db.execute(_ADD_RESULT, values | {"seq": ended[0]["seq"]})
    return bool(ended)


def cancel(db: sqlite3.Connection, values: dict[str, Any]) -> tuple[RolloutState | None, bool]:
    """Return the state the rollout was in, None if unknown, and whether this ended it."""
    row = db.execute(_STATE_AND_OWNER, values).fetchone()
    if row is None:
        db.execute(_ADD_TOMBSTONE, values)
        return None, False
    state = RolloutState(row["state"])
    if state.terminal:
        return state, False
    if row["owner"] is None:
        db.execute(_CANCEL_NOW, values)
        return state, True
    if not row["cancel"]:
        db.execute(_CANCEL_LATER, values)  # its trigger gives the event this time
        db.execute(_UNMOVED, {"id": values["id"], "before": row["changed_at"]})
    return state, False


def get(db: sqlite3.Connection, rollout_id: str, shown: codec.Shown = codec.Shown.REQUESTED) -> Rollout | None:
    row = db.execute(_GET, (rollout_id,)).fetchone()
    return codec.decode_rollout(row, shown) if row else None


def tree(db: sqlite3.Connection, rollout_id: str, *, with_trajectories: bool) -> sqlite3.Row | None:
    """Return the row of a rollout that has ended, as `codec.decode_tree` reads it."""
    values = {"id": rollout_id, "with_trajectories": with_trajectories}
    row: sqlite3.Row | None = db.execute(_TREE, values).fetchone()
    return row


def page(
    db: sqlite3.Connection, state: RolloutState | None, after: int, limit: int
) -> tuple[list[sqlite3.Row], dict[RolloutState, int]]:
    values = {"state": state, "after": after, "limit": limit}
    return db.execute(_PAGE if state is None else _PAGE_IN_STATE, values).fetchall(), counts(db)


def counts(db: sqlite3.Connection) -> dict[RolloutState, int]:
    return {RolloutState(row["state"]): row["count"] for row in db.execute(_COUNTS)}


# A turn is saved only while its lease is held and if it is the next of its rollout. A trigger deletes the turns of a
# rollout that ends.

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
_SAVED_STEPS = """
SELECT rollout_id, data FROM rollouts JOIN steps ON steps.rollout = rollouts.seq
WHERE rollout_id IN (SELECT value FROM json_each(?)) AND number >= 0 ORDER BY rollouts.seq, number
"""
_DELETE = """
DELETE FROM turns WHERE rollout = (SELECT seq FROM rollouts WHERE rollout_id = :id) AND number >= :kept
"""
_RESTART = """
UPDATE rollouts SET
    state = iif(cancel, 'cancelled', 'queued'), stop_reason = iif(cancel, 'cancelled', NULL),
    owner = NULL, attempt = attempt - (state != 'queued'), spans = :spans, queued_at = :now, changed_at = :now
WHERE rollout_id = :id AND owner = :owner AND token = :token
RETURNING rollout_id, state
"""


def save(db: sqlite3.Connection, owner: str, turns: Sequence[UnsavedTurn]) -> int:
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
    return [row["data"] for row in db.execute(_SAVED, (rollout_id,))]


def delete(db: sqlite3.Connection, values: dict[str, Any]) -> None:
    """Delete the turns of the rollout `id`, except for the first `kept`, if this is given."""
    db.execute(_DELETE, {"kept": 0} | values)


def restart(db: sqlite3.Connection, values: dict[str, Any]) -> list[sqlite3.Row]:
    """Requeue a leased rollout with its first turns alone; return its row, or nothing if the lease is lost."""
    rows = db.execute(_RESTART, values).fetchall()
    if rows:
        delete(db, values)
    return rows


def save_steps(db: sqlite3.Connection, attempts: Sequence[EncodedSteps]) -> int:
    return sum(
        db.execute(_SAVE_STEPS, {"id": one.rollout_id, "data": one.data, "most": MAX_RECORDS}).rowcount
        for one in attempts
    )


def saved_steps(db: sqlite3.Connection, rollout_ids: Sequence[str]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for row in db.execute(_SAVED_STEPS, (json.dumps(list(rollout_ids)),)):
        found.setdefault(row["rollout_id"], []).append(row["data"])
    return found
