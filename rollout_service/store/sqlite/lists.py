"""The statements that list rollouts and the groups of runs; each function runs in the database's thread.

A search for rollouts goes along one index, the one with the fewest rows that may match, in the order of numbers. It
looks at a bounded number of rows, so that other jobs do not wait for long, and says how far it came.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from api_schemas.views.summaries import SummaryFilter, SummaryOrder
from rollout_service.store.codec.groups import StoredGroup, StoredGroups
from rollout_service.store.lists_contract import CLOCK_STEP_SECONDS, LOOKED_AT, GroupSelection
from rollout_service.store.sqlite.history import records_of
from rollout_service.store.sqlite.run_statements import row_of

ROWS_AT_ONCE = 10_000
"""The most rows that one job looks at, which takes about 10 ms."""
_COUNTED = 10_000
"""How many rows of an index are counted at most, to compare it with others."""
_NEWEST = 2**62

_COLUMNS = """
rollouts.seq, rollout_id, rollouts.state, environment, rollouts.pool, run_id, group_number, attempt, reward,
branch_of, stop_reason, code, rollouts.created_at, rollouts.changed_at, turns, tokens, worked
"""
_RUN = "SELECT seq FROM runs WHERE run_id = ?"
_SPAN = """
SELECT (SELECT min(seq) FROM rollouts INDEXED BY by_run WHERE run = :run) AS low,
    (SELECT max(seq) FROM rollouts INDEXED BY by_run WHERE run = :run) AS high
"""
_ENDS = """
SELECT coalesce((SELECT min(seq) FROM rollouts), 1) AS low, coalesce((SELECT max(seq) FROM rollouts), 0) AS high
"""
_NEXT = "SELECT seq, created_at FROM rollouts WHERE seq >= ? ORDER BY seq LIMIT 1"
_IN_STATES = "SELECT coalesce(sum(count), 0) FROM counts WHERE state IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True, slots=True)
class SummarySearch:
    which: SummaryFilter
    order: SummaryOrder
    after: int | None
    """The number after which to go on; None to begin."""
    limit: int


@dataclass(frozen=True, slots=True)
class SummaryRows:
    rows: Sequence[sqlite3.Row]
    next: int | None
    """The number after which to go on; None if nothing is left."""


@dataclass(frozen=True, slots=True)
class _Path:
    """A way through the rollouts: an index and the condition by which it is used."""

    source: str
    conditions: Sequence[str]
    rows: int
    """About how many rows are on it, at most `_COUNTED`."""


def look(db: sqlite3.Connection, search: SummarySearch) -> SummaryRows:
    """Look only at the next `ROWS_AT_ONCE` that may match."""
    values = _values(search)
    if search.which.run is not None:
        run = db.execute(_RUN, (search.which.run,)).fetchone()
        if run is None:
            return SummaryRows([], None)
        values["run"] = run["seq"]
    values["low"], values["high"] = _bounds(db, search, values)
    direction = "DESC" if search.order == "newest" else "ASC"
    looked = _numbers(_best_path(db, search.which, values), direction)
    found = db.execute(_page(looked, search.which), values).fetchall()
    if len(found) > search.limit:
        found = found[: search.limit]
        return SummaryRows(found, found[-1]["seq"])
    edge = "min" if search.order == "newest" else "max"
    end = db.execute(f"SELECT {edge}(seq) AS seq, count(*) AS rows FROM ({looked})", values).fetchone()  # noqa: S608
    return SummaryRows(found, end["seq"] if end["rows"] == ROWS_AT_ONCE else None)


def _values(search: SummarySearch) -> dict[str, Any]:
    which = search.which
    values: dict[str, Any] = {f"state{n}": state for n, state in enumerate(which.states)}
    return values | {
        "group": which.group,
        "environment": which.environment,
        "code": which.error,
        "reward_min": which.reward_min,
        "reward_max": which.reward_max,
        "since": None if which.since is None else which.since.timestamp(),
        "until": None if which.until is None else which.until.timestamp(),
        "text": which.text,
        "text_end": f"{which.text}\x7f",  # ids have no character beyond
        "wanted": search.limit + 1,
        "looked": ROWS_AT_ONCE,
    }


def _page(looked: str, which: SummaryFilter) -> str:
    conditions = " AND ".join(_conditions(which)) or "true"
    return f"""
SELECT {_COLUMNS} FROM ({looked}) AS looked CROSS JOIN rollouts ON rollouts.seq = looked.seq
    LEFT JOIN runs ON runs.seq = rollouts.run LEFT JOIN branches ON branches.seq = rollouts.seq
WHERE {conditions} LIMIT :wanted
"""  # noqa: S608 - made of constants


def _conditions(which: SummaryFilter) -> Iterator[str]:
    if which.states:
        yield f"rollouts.state IN ({', '.join(f':state{n}' for n in range(len(which.states)))})"
    given = {
        "rollouts.run = :run": which.run,
        "group_number = :group": which.group,
        "environment = :environment": which.environment,
        "code = :code": which.error,
        "reward >= :reward_min": which.reward_min,
        "reward <= :reward_max": which.reward_max,
        "rollouts.created_at >= :since": which.since,
        "rollouts.created_at < :until": which.until,
        "rollout_id >= :text AND rollout_id < :text_end": which.text,
    }
    yield from (condition for condition, value in given.items() if value is not None)


def _numbers(path: _Path, direction: str) -> str:
    arms = [
        f"SELECT seq FROM rollouts {path.source} WHERE {condition} AND seq BETWEEN :low AND :high"  # noqa: S608
        for condition in path.conditions
    ]
    return f"{' UNION ALL '.join(arms)} ORDER BY seq {direction} LIMIT :looked"  # SQLite merges the arms in order


def _best_path(db: sqlite3.Connection, which: SummaryFilter, values: dict[str, Any]) -> _Path:
    """Return the path with the fewest rows; among those with very many, the first."""
    paths = list(_paths(db, which, values))
    return min(paths, key=lambda path: path.rows)


def _paths(db: sqlite3.Connection, which: SummaryFilter, values: dict[str, Any]) -> Iterator[_Path]:
    if which.group is not None:
        yield _Path("INDEXED BY rollouts_of_group", ["run = :run AND group_number = :group"], 0)
    if which.error is not None:
        yield _counted(db, "INDEXED BY by_code", "code = :code", values)
    if which.text is not None:
        condition = "rollout_id >= :text AND rollout_id < :text_end"
        by_id = _counted(db, "INDEXED BY sqlite_autoindex_rollouts_1", condition, values)
        if by_id.rows < _COUNTED:  # its rows have to be sorted
            yield by_id
    if which.states:
        states = [f"state = :state{n}" for n in range(len(which.states))]
        (rows,) = db.execute(_IN_STATES, (json.dumps(list(which.states)),)).fetchone()
        yield _Path("INDEXED BY by_state", states, min(rows, _COUNTED))
    if which.run is not None:
        yield _counted(db, "INDEXED BY by_run", "run = :run", values)
    if which.environment is not None:
        yield _counted(db, "INDEXED BY by_environment", "environment = :environment", values)
    yield _Path("NOT INDEXED", ["true"], _COUNTED + 1)


def _counted(db: sqlite3.Connection, source: str, condition: str, values: dict[str, Any]) -> _Path:
    statement = f"""
SELECT count(*) FROM (SELECT 1 FROM rollouts {source} WHERE {condition} LIMIT {_COUNTED})
"""  # noqa: S608 - made of constants
    (rows,) = db.execute(statement, values).fetchone()
    return _Path(source, [condition], rows)


def _bounds(db: sqlite3.Connection, search: SummarySearch, values: dict[str, Any]) -> tuple[int, int]:
    """Return the lowest and the highest number that is worth looking at."""
    low, high = 0, _NEWEST
    if search.after is not None and search.order == "newest":
        high = search.after - 1
    elif search.after is not None:
        low = search.after + 1
    if "run" in values:
        span = db.execute(_SPAN, values).fetchone()
        low, high = max(low, span["low"] or 0), min(high, span["high"] or 0)
    if values["since"] is not None:
        low = max(low, _number_at(db, values["since"] - CLOCK_STEP_SECONDS))
    if values["until"] is not None:
        high = min(high, _number_at(db, values["until"] + CLOCK_STEP_SECONDS))
    return low, high


def _number_at(db: sqlite3.Connection, time: float) -> int:
    """Return the number of about the first rollout that was submitted at this time or later."""
    low, high = db.execute(_ENDS).fetchone()
    high += 1
    while low < high:
        middle = (low + high) // 2
        found = db.execute(_NEXT, (middle,)).fetchone()
        if found is None or found["created_at"] >= time:
            high = middle
        else:
            low = found["seq"] + 1
    return int(low)


_GROUP_COLUMNS = """
groups.number, groups.state, groups.reason, groups.members, groups.summary, batches.number AS batch_number
"""
_GROUP_ROLLOUTS = """
SELECT rollout_id, state, reward, code, tokens, environment FROM rollouts
WHERE rollout_id IN (SELECT value FROM json_each(?))
"""


def look_at_groups(
    db: sqlite3.Connection,
    run_id: str,
    which: GroupSelection,
    order: SummaryOrder,
    after: int | None,
    limit: int,
) -> StoredGroups:
    run = row_of(db, run_id)["seq"]
    low, high = 0, _NEWEST
    if after is not None:
        low, high = (0, after - 1) if order == "newest" else (after + 1, _NEWEST)
    values: dict[str, Any] = {"run": run, "state": which.state, "reason": which.reason}
    values |= {"low": low, "high": high, "wanted": limit + 1, "looked": LOOKED_AT}
    looked = _looked_groups(which, "DESC" if order == "newest" else "ASC")
    rows = db.execute(_group_page(looked, which), values).fetchall()
    if len(rows) > limit:
        return _stored_groups(db, run, rows[:limit], rows[limit - 1]["number"])
    edge = "min" if order == "newest" else "max"
    last = f"SELECT {edge}(number) AS number, count(*) AS rows FROM ({looked})"  # noqa: S608
    end = db.execute(last, values).fetchone()
    return _stored_groups(db, run, rows, end["number"] if end["rows"] == LOOKED_AT else None)


def _looked_groups(which: GroupSelection, direction: str) -> str:
    source = "groups" if which.state is None else "groups INDEXED BY groups_by_state"
    in_state = "" if which.state is None else "AND state = :state"
    return f"""
SELECT seq, number, reason FROM {source} WHERE run = :run {in_state} AND number BETWEEN :low AND :high
ORDER BY number {direction} LIMIT :looked
"""  # noqa: S608 - made of constants


def _group_page(looked: str, which: GroupSelection) -> str:
    condition = "true" if which.reason is None else "looked.reason = :reason"
    return f"""
SELECT {_GROUP_COLUMNS} FROM ({looked}) AS looked CROSS JOIN groups ON groups.seq = looked.seq
    LEFT JOIN batches ON batches.seq = groups.batch
WHERE {condition} LIMIT :wanted
"""  # noqa: S608 - made of constants


def _stored_groups(
    db: sqlite3.Connection, run: int, rows: Sequence[sqlite3.Row], next_after: int | None
) -> StoredGroups:
    records = records_of(db, run, [row["number"] for row in rows])
    groups = [
        StoredGroup(
            number=row["number"],
            state=row["state"],
            reason=row["reason"],
            batch=row["batch_number"],
            members=json.loads(row["members"]),
            summary=row["summary"],
            record=records[row["number"]],
        )
        for row in rows
    ]
    ids = json.dumps([name for group in groups for name in group.members])
    found = {row["rollout_id"]: row for row in db.execute(_GROUP_ROLLOUTS, (ids,))}
    return StoredGroups(groups, found, next_after)
