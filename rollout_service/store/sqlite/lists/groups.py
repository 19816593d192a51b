"""The statements that list the groups of a run; each function runs in the database's thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from api_schemas.views.summaries import SummaryOrder
from rollout_service.store.codec.groups import StoredGroup, StoredGroups
from rollout_service.store.lists_contract import LOOKED_AT, GroupSelection
from rollout_service.store.sqlite.lists.history import records_of
from rollout_service.store.sqlite.run_statements import row_of

_NEWEST = 2**62
_COLUMNS = """
groups.number, groups.state, groups.reason, groups.members, groups.summary, batches.number AS batch_number
"""
_ROLLOUTS = """
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
    looked = _looked(which, "DESC" if order == "newest" else "ASC")
    rows = db.execute(_page(looked, which), values).fetchall()
    if len(rows) > limit:
        return _stored(db, run, rows[:limit], rows[limit - 1]["number"])
    edge = "min" if order == "newest" else "max"
    last = f"SELECT {edge}(number) AS number, count(*) AS rows FROM ({looked})"  # noqa: S608
    end = db.execute(last, values).fetchone()
    return _stored(db, run, rows, end["number"] if end["rows"] == LOOKED_AT else None)


def _looked(which: GroupSelection, direction: str) -> str:
    """Return the statement for the next groups in the order of their numbers."""
    source = "groups" if which.state is None else "groups INDEXED BY groups_by_state"
    in_state = "" if which.state is None else "AND state = :state"
    return f"""
SELECT seq, number, reason FROM {source} WHERE run = :run {in_state} AND number BETWEEN :low AND :high
ORDER BY number {direction} LIMIT :looked
"""  # noqa: S608 - made of constants


def _page(looked: str, which: GroupSelection) -> str:
    condition = "true" if which.reason is None else "looked.reason = :reason"
    return f"""
SELECT {_COLUMNS} FROM ({looked}) AS looked CROSS JOIN groups ON groups.seq = looked.seq
    LEFT JOIN batches ON batches.seq = groups.batch
WHERE {condition} LIMIT :wanted
"""  # noqa: S608 - made of constants


def _stored(
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
    found = {row["rollout_id"]: row for row in db.execute(_ROLLOUTS, (ids,))}
    return StoredGroups(groups, found, next_after)
