"""The statements on runs and groups; each function runs inside one transaction, in the database's thread.

A function with the name of a method of `RunStore` does what that promises.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import InlineTasks, RunRequest, RunState
from api_schemas.tasks import Task
from rollout_service.store import rules
from rollout_service.store.base import unknown_run
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.record import id_taken
from rollout_service.store.codec.runs import encode_record
from rollout_service.store.rules import SettledGroup
from rollout_service.store.runs_contract import GroupClosure, NewGroup, OpenGroup, RunRecord
from rollout_service.store.sqlite import history
from rollout_service.store.sqlite import rollout_statements as statements

_CREATE = """
INSERT INTO runs (run_id, fingerprint, request, state, version, first_version, tasks, total, digest,
    created_at, changed_at)
VALUES (:id, :fingerprint, :request, 'running', :version, :version, :tasks, :total, :digest, :now, :now)
ON CONFLICT (run_id) DO NOTHING
"""
_BY_ID = "SELECT * FROM runs WHERE run_id = ?"
_ALL = "SELECT * FROM runs ORDER BY seq"
_ACTIVE = """
SELECT * FROM runs WHERE state IN ('running', 'paused')
    OR EXISTS (SELECT 1 FROM groups WHERE groups.run = runs.seq AND groups.state = 'open')
ORDER BY seq
"""
_COUNTERS = "SELECT name, count FROM tallies WHERE run = ? AND count <> 0"
_ADD_TO_COUNTER = "INSERT INTO tallies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count"
_UPDATE = """
UPDATE runs SET state = :state, version = :version, request = :request, problem = :problem,
    changed_at = :now WHERE seq = :seq
"""
_CLEAR_PROBLEM = "UPDATE runs SET problem = NULL, changed_at = :now WHERE seq = :seq"
_TASKS = "SELECT task FROM run_tasks WHERE run = ? AND number >= ? ORDER BY number LIMIT ?"
_ADD_TASK = "INSERT INTO run_tasks VALUES (?, ?, ?)"
_APPENDED = "UPDATE runs SET tasks = :tasks, total = :total, changed_at = :now WHERE seq = :seq"
_MOVE_CURSOR = "UPDATE runs SET cursor = :cursor, changed_at = :now WHERE seq = :seq"

_START = "INSERT INTO groups (run, number, epoch, members, opened_at, changed_at) VALUES (?, ?, ?, ?, ?, ?)"
_MEMBERS = """
SELECT groups.number, groups.cut, groups.reason, groups.summary, member.key AS sample,
    member.value AS rollout_id, rollouts.state, rollouts.reward, rollouts.changed_at,
    results.oldest_version, results.newest_version,
    EXISTS (SELECT 1 FROM steps WHERE rollout = rollouts.seq AND steps.number = -1) AS is_erased
FROM groups, json_each(groups.members) AS member
    LEFT JOIN rollouts ON rollouts.rollout_id = member.value LEFT JOIN results ON results.seq = rollouts.seq
"""
_OPEN = _MEMBERS + "WHERE groups.run = ? AND groups.state = 'open' ORDER BY groups.number, sample"
_STALE = (
    _MEMBERS
    + """
WHERE groups.run = ? AND groups.state = 'ready' AND groups.oldest_version < ? ORDER BY groups.number, sample
"""
)
_GROUP_STATES = """
SELECT number, iif(state = 'dropped', 'dropped:' || reason, state) AS state FROM groups WHERE run = ?
"""
_EXTEND = """
UPDATE groups SET changed_at = :now,
    members = (SELECT json_group_array(value) FROM (
        SELECT value FROM json_each(groups.members) UNION ALL SELECT value FROM json_each(:ids)
    ))
WHERE run = :run AND number = :number AND state = 'open' AND json_array_length(members) = :first
"""
_REPLACE_MEMBER = """
UPDATE groups SET members = json_set(members, '$[' || :sample || ']', :id), changed_at = :now
WHERE run = :run AND number = :number AND state = 'open'
"""
_MARK_STRAGGLERS = "UPDATE groups SET cut = :cut WHERE run = :run AND number = :number AND state = 'open'"
_CANCEL_GROUPS = "UPDATE groups SET reason = :reason WHERE run = :run AND state = 'open' AND reason IS NULL"
_CLOSE = """
UPDATE groups SET state = :state, reason = :reason, samples = :samples, summary = :summary,
    oldest_version = :oldest, changed_at = :now,
    bytes = (
        SELECT coalesce(sum(length(trajectory)), 0) FROM rollouts JOIN results USING (seq)
        WHERE rollout_id IN (SELECT value FROM json_each(:ids))
    )
WHERE run = :run AND number = :number AND state = 'open'
"""
_RECLOSE = """
UPDATE groups SET state = :state, reason = :reason, samples = :samples, summary = :summary,
    oldest_version = :oldest, changed_at = :now
WHERE run = :run AND number = :number AND state = 'ready'
"""
_KEEP_HEAD = """
INSERT OR REPLACE INTO group_heads (seq, form, tokens, json)
SELECT seq, :form, :tokens, :json FROM groups WHERE run = :run AND number = :number AND state = 'ready'
"""
_ERASED = """
SELECT 1 FROM rollouts JOIN steps ON steps.rollout = rollouts.seq AND steps.number = -1
WHERE rollout_id IN (SELECT value FROM json_each(?)) LIMIT 1
"""
_READY_SAMPLES = "SELECT samples FROM groups WHERE run = ? AND number = ? AND state = 'ready'"
_FINISH = "UPDATE runs SET state = 'finished', changed_at = :now WHERE run_id = :id"
_PRUNABLE = """
SELECT number, bytes, changed_at FROM groups
WHERE run = ? AND state IN ('acknowledged', 'dropped') AND NOT pruned ORDER BY changed_at DESC
"""
_PRUNE_RESULTS = """
UPDATE results SET trajectory = NULL WHERE seq IN (
    SELECT seq FROM rollouts WHERE run = :run AND group_number = :number
)
"""
_PRUNED = "UPDATE groups SET pruned = 1 WHERE run = :run AND number = :number"


def row_of(db: sqlite3.Connection, run_id: str) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(_BY_ID, (run_id,)).fetchone()
    if row is None:
        raise unknown_run(run_id)
    return row


def record_of(db: sqlite3.Connection, row: sqlite3.Row) -> RunRecord:
    counters = {row["name"]: row["count"] for row in db.execute(_COUNTERS, (row["seq"],))}
    return run_codec.decode_run(row, counters)


def seq_and_counters(db: sqlite3.Connection, run_id: str) -> tuple[int, dict[str, int]]:
    row = row_of(db, run_id)
    return row["seq"], {row["name"]: row["count"] for row in db.execute(_COUNTERS, (row["seq"],))}


def add_to_counters(db: sqlite3.Connection, run: int, counts: Mapping[str, int]) -> None:
    db.executemany(_ADD_TO_COUNTER, [(run, name, count) for name, count in counts.items()])


def create(db: sqlite3.Connection, values: dict[str, Any], request: RunRequest) -> tuple[RunRecord, bool]:
    new = db.execute(_CREATE, values).rowcount > 0
    row = row_of(db, values["id"])
    if row["fingerprint"] != values["fingerprint"]:
        raise id_taken("run", values["id"])
    if new and isinstance(request.source, InlineTasks):
        _add_tasks(db, row["seq"], 0, request.source.tasks)
    return record_of(db, row), new


def _add_tasks(db: sqlite3.Connection, run: int, first: int, tasks: Sequence[Task]) -> None:
    rows = [(run, number, task.model_dump_json()) for number, task in enumerate(tasks, start=first)]
    db.executemany(_ADD_TASK, rows)


def get(db: sqlite3.Connection, run_id: str) -> RunRecord:
    return record_of(db, row_of(db, run_id))


def list_runs(db: sqlite3.Connection) -> list[RunRecord]:
    return [record_of(db, row) for row in db.execute(_ALL).fetchall()]


def active_runs(db: sqlite3.Connection) -> list[RunRecord]:
    return [record_of(db, row) for row in db.execute(_ACTIVE).fetchall()]


def update(
    db: sqlite3.Connection,
    now: float,
    run_id: str,
    *,
    state: RunState | None = None,
    version: int | None = None,
    changes: Mapping[str, JsonValue] | None = None,
    problem: ErrorInfo | None = None,
) -> RunRecord:
    row = row_of(db, run_id)
    before = record_of(db, row)
    kept = None if state is RunState.RUNNING else row["problem"]
    values = {
        "state": str(rules.next_state(before, state)),
        "version": max(row["version"], row["version"] if version is None else version),
        "request": run_codec.encode_request(before.request.model_copy(update=changes)) if changes else row["request"],
        "problem": kept if problem is None else problem.model_dump_json(),
    }
    restarted = rules.restart_counts(before.counters) if state is RunState.RUNNING else {}
    add_to_counters(db, row["seq"], restarted)
    if not any(restarted.values()) and all(row[name] == value for name, value in values.items()):
        return get(db, run_id)
    db.execute(_UPDATE, values | {"seq": row["seq"], "now": now})
    if values["state"] == row["state"]:
        announce(db, run_id, now)
    return get(db, run_id)


def announce(db: sqlite3.Connection, run_id: str, now: float) -> None:
    """Report a change that no other event reports."""
    db.execute(statements.RECORD, {"now": now, "kind": "run.changed", "subject": run_id, "data": "{}"})


def append(
    db: sqlite3.Connection, now: float, run_id: str, tasks: Sequence[Task], *, offset: int | None, close: bool
) -> RunRecord:
    row = row_of(db, run_id)
    run = record_of(db, row)
    first = run.tasks if offset is None else offset
    there = [] if offset is None else _tasks(db, row["seq"], first, len(tasks))
    if rules.is_appended(run, there, tasks, offset=offset, close=close):
        return run
    rules.check_append(run, first)
    _add_tasks(db, row["seq"], first, tasks)
    count = first + len(tasks)
    db.execute(_APPENDED, {"seq": row["seq"], "tasks": count, "total": count if close else None, "now": now})
    finish_if_done(db, run_id, now)
    announce(db, run_id, now)
    return get(db, run_id)


def inline_tasks(db: sqlite3.Connection, run_id: str, *, first: int, limit: int) -> list[Task]:
    return _tasks(db, row_of(db, run_id)["seq"], first, limit)


def _tasks(db: sqlite3.Connection, run: int, first: int, limit: int) -> list[Task]:
    return run_codec.decode_tasks(row["task"] for row in db.execute(_TASKS, (run, first, limit)))


def start_groups(db: sqlite3.Connection, now: float, run_id: str, groups: Sequence[NewGroup]) -> int:
    row = row_of(db, run_id)
    if not rules.can_start(record_of(db, row), groups):
        return 0
    for group in groups:
        ids = [_submit(db, row["seq"], group.number, request, now) for request in group.requests]
        db.execute(_START, (row["seq"], group.number, group.epoch, json.dumps(ids), now, now))
    db.execute(_MOVE_CURSOR, {"seq": row["seq"], "cursor": groups[-1].number + 1, "now": now})
    return len(groups)


def _submit(db: sqlite3.Connection, run: int, number: int, request: RolloutRequest, now: float) -> str:
    values = statements.submission(request, now, run=run, group_number=number)
    rollout, _ = statements.submit(db, values)
    return rollout.rollout_id


def open_groups(db: sqlite3.Connection, run_id: str, now: float) -> list[OpenGroup]:
    return _groups(db.execute(_OPEN, (row_of(db, run_id)["seq"],)).fetchall(), now)


def stale_groups(db: sqlite3.Connection, run: int, bound: int, now: float) -> list[OpenGroup]:
    """Return waiting groups with a usable sample older than this version."""
    return _groups(db.execute(_STALE, (run, bound)).fetchall(), now)


def _groups(rows: Sequence[sqlite3.Row], now: float) -> list[OpenGroup]:
    return [_group(list(of), now) for _, of in groupby(rows, key=itemgetter("number"))]


def _group(rows: Sequence[sqlite3.Row], now: float) -> OpenGroup:
    """Return a group from its rows, one for each of its rollouts."""
    first = rows[0]
    cut = json.loads(first["cut"])
    members = (
        run_codec.decode_member(row, now, sample=row["sample"], is_straggler=row["sample"] in cut) for row in rows
    )
    return OpenGroup(
        number=first["number"],
        members=[member for member in members if member is not None],
        cancel_reason=first["reason"],
        lost=[row["rollout_id"] for row in rows if row["state"] is None],
        reward_weights=run_codec.decode_weights(first["summary"]),
    )


def group_states(db: sqlite3.Connection, run_id: str) -> dict[int, str]:
    rows = db.execute(_GROUP_STATES, (row_of(db, run_id)["seq"],))
    return {row["number"]: row["state"] for row in rows}


def extend_group(
    db: sqlite3.Connection,
    now: float,
    run_id: str,
    number: int,
    first: int,
    requests: Sequence[RolloutRequest],
) -> None:
    run = row_of(db, run_id)["seq"]
    ids = json.dumps([request.rollout_id for request in requests])
    values = {"run": run, "number": number, "first": first, "ids": ids, "now": now}
    if db.execute(_EXTEND, values).rowcount:
        for request in requests:
            _submit(db, run, number, request, now)


def retry_sample(
    db: sqlite3.Connection, now: float, run_id: str, number: int, sample: int, request: RolloutRequest
) -> None:
    run = row_of(db, run_id)["seq"]
    values = {"run": run, "number": number, "sample": sample, "id": request.rollout_id, "now": now}
    if db.execute(_REPLACE_MEMBER, values).rowcount:
        _submit(db, run, number, request, now)
        add_to_counters(db, run, {"retried": 1})


def mark_stragglers(db: sqlite3.Connection, run_id: str, number: int, samples: Sequence[int]) -> None:
    run = row_of(db, run_id)["seq"]
    db.execute(_MARK_STRAGGLERS, {"run": run, "number": number, "cut": json.dumps(sorted(samples))})


def cancel_groups(db: sqlite3.Connection, run_id: str, reason: str) -> None:
    db.execute(_CANCEL_GROUPS, {"run": row_of(db, run_id)["seq"], "reason": reason})


def close_group(
    db: sqlite3.Connection, run_id: str, closure: GroupClosure, head: Mapping[str, Any] | None, now: float
) -> None:
    if _uses_erased(db, closure):
        return
    row = row_of(db, run_id)
    run = row["seq"]
    values = _closed(run, closure, now) | {"ids": json.dumps([sample.rollout_id for sample in closure.samples])}
    before = record_of(db, row)
    if db.execute(_CLOSE, values).rowcount:
        _keep_head(db, run, closure.number, head)
        add_to_counters(db, run, rules.closing_counts(closure, before.counters))
        if rules.ends_problem(before, closure):
            db.execute(_CLEAR_PROBLEM, {"seq": run, "now": now})
            announce(db, run_id, now)
        history.write(db, run, closure.number, encode_record(closure, version=row["version"], now=now))
        finish_if_done(db, run_id, now)


def reclose_group(
    db: sqlite3.Connection, run_id: str, closure: GroupClosure, head: Mapping[str, Any] | None, now: float
) -> None:
    if _uses_erased(db, closure):
        return
    row = row_of(db, run_id)
    run = row["seq"]
    waiting = db.execute(_READY_SAMPLES, (run, closure.number)).fetchone()
    if waiting is None:
        return
    before = run_codec.decode_samples(waiting["samples"])
    db.execute(_RECLOSE, _closed(run, closure, now))
    _keep_head(db, run, closure.number, head)
    add_to_counters(db, run, rules.masked_counts(closure.samples, before))
    history.write(db, run, closure.number, encode_record(closure, version=row["version"], now=now))
    finish_if_done(db, run_id, now)
    announce(db, run_id, now)


def _uses_erased(db: sqlite3.Connection, closure: GroupClosure) -> bool:
    """Return whether a sample was erased since the decision, which has what the sample was."""
    ids = rules.not_erased(closure.samples)
    return db.execute(_ERASED, (json.dumps(ids),)).fetchone() is not None


def _keep_head(db: sqlite3.Connection, run: int, number: int, head: Mapping[str, Any] | None) -> None:
    if head is not None:
        db.execute(_KEEP_HEAD, {**head, "run": run, "number": number})


def _closed(run: int, closure: GroupClosure, now: float) -> dict[str, Any]:
    return {
        "run": run,
        "number": closure.number,
        "state": closure.state,
        "reason": closure.reason,
        "samples": run_codec.encode_samples(closure.samples),
        "summary": run_codec.encode_summary(closure),
        "oldest": closure.oldest_version,
        "now": now,
    }


def finish_if_done(db: sqlite3.Connection, run_id: str, now: float) -> None:
    if rules.is_finished(get(db, run_id)):
        db.execute(_FINISH, {"id": run_id, "now": now})


def prune(db: sqlite3.Connection, now: float, run_id: str, *, seconds: float | None, max_bytes: int | None) -> int:
    run = row_of(db, run_id)["seq"]
    rows = db.execute(_PRUNABLE, (run,)).fetchall()
    settled = [SettledGroup(row["number"], row["bytes"], row["changed_at"]) for row in rows]
    pruned = rules.groups_to_prune(settled, seconds=seconds, max_bytes=max_bytes, now=now)
    for number in pruned:
        db.execute(_PRUNE_RESULTS, {"run": run, "number": number})
        db.execute(_PRUNED, {"run": run, "number": number})
    return len(pruned)
