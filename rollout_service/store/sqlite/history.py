"""The statements on the history of runs; each function runs inside one transaction, in the database's thread.

The records of `RECORDS_IN_ROW` groups are one row: reading 100,000 of them takes 8 MB in a few thousand rows, and
writing one rewrites at most 2.5 kB.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from rollout_service.store.codec.runs import REASON_AT, SIZE, encode_reason

RECORDS_IN_ROW = 32
ROWS_AT_ONCE = 1_000

_READ = "SELECT records FROM group_history WHERE run = ? AND part = ?"
_WRITE = """
INSERT INTO group_history (run, part, records) VALUES (?, ?, ?)
ON CONFLICT (run, part) DO UPDATE SET records = excluded.records
"""
_PARTS = """
SELECT part, records FROM group_history WHERE run = ? AND part >= ? ORDER BY part LIMIT ?
"""
_SOME = "SELECT part, records FROM group_history WHERE run = ? AND part IN (SELECT value FROM json_each(?))"


def write(db: sqlite3.Connection, run: int, number: int, record: bytes) -> None:
    _patch(db, run, number, 0, record)


def write_reason(db: sqlite3.Connection, run: int, number: int, reason: str) -> None:
    """Write why a group was dropped after it had passed the filters."""
    _patch(db, run, number, REASON_AT, encode_reason(reason))


def _patch(db: sqlite3.Connection, run: int, number: int, offset: int, data: bytes) -> None:
    part, place = divmod(number, RECORDS_IN_ROW)
    found = db.execute(_READ, (run, part)).fetchone()
    records = bytearray(found["records"] if found else b"")
    start = place * SIZE + offset
    records.extend(bytes(max(0, (place + 1) * SIZE - len(records))))
    records[start : start + len(data)] = data
    db.execute(_WRITE, (run, part, bytes(records)))


def read_from(db: sqlite3.Connection, run: int, part: int) -> list[tuple[int, bytes]]:
    """Return the next rows, with their numbers."""
    return [(row["part"], row["records"]) for row in db.execute(_PARTS, (run, part, ROWS_AT_ONCE))]


def records_of(db: sqlite3.Connection, run: int, numbers: Iterable[int]) -> dict[int, bytes]:
    """Return the records of some groups; an empty one for a group without."""
    wanted = list(numbers)
    parts = json.dumps(sorted({number // RECORDS_IN_ROW for number in wanted}))
    rows = {row["part"]: row["records"] for row in db.execute(_SOME, (run, parts))}
    found = {}
    for number in wanted:
        part, place = divmod(number, RECORDS_IN_ROW)
        found[number] = rows.get(part, b"")[place * SIZE : (place + 1) * SIZE]
    return found
