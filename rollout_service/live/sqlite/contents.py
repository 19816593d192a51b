"""The texts of users and the model, kept apart: see `schema` for why.

Each function runs inside one transaction, in the database's thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from rollout_service.live.contract import NextStateRecord, TurnMarkRecord, TurnRecord
from rollout_service.live.sqlite.schema import PAGE_SIZE

What: TypeAlias = Literal["turn", "state", "mark", "revision", "metadata"]

NO_TURN = -1
"""Stands for the session itself."""

_MARK = TypeAdapter(TurnMarkRecord)
_STATE = TypeAdapter(NextStateRecord)

_PUT = """
INSERT INTO contents (session, turn, what, padding, data, body)
VALUES (:session, :turn, :what, zeroblob(:padding), :data, :body)
"""
_OF_TURN = "SELECT turn, what, data, body FROM contents WHERE session = ? AND turn = ?"
_REVISIONS = "FROM contents WHERE session = ? AND turn = ? AND what = 'revision'"
_FROM_TURN = "SELECT turn, what, data, body FROM contents WHERE session = ? AND turn >= ? ORDER BY turn"


def put(db: sqlite3.Connection, session: int, turn: int, what: What, data: bytes, body: bytes | None = None) -> None:
    values = {"session": session, "turn": turn, "what": what, "data": data, "body": body}
    db.execute(_PUT, values | {"padding": PAGE_SIZE})


def put_turn(db: sqlite3.Connection, session: int, turn: TurnRecord) -> int:
    """Return the size in bytes."""
    data = to_json({"answer": turn.answer, "calls": turn.calls})
    put(db, session, turn.turn, "turn", data, turn.body)
    return len(data) + len(turn.body)


def put_state(db: sqlite3.Connection, session: int, turn: int, state: NextStateRecord) -> int:
    """Return the size in bytes."""
    data = _STATE.dump_json(state)
    put(db, session, turn, "state", data)
    return len(data)


def put_mark(
    db: sqlite3.Connection,
    session: int,
    turn: int,
    mark: TurnMarkRecord,
    what: Literal["mark", "revision"] = "mark",
) -> None:
    """Replace an earlier mark, or add a revision."""
    if what == "mark":
        db.execute("DELETE FROM contents WHERE session = ? AND turn = ? AND what = 'mark'", (session, turn))
    put(db, session, turn, what, _MARK.dump_json(mark))


def mark_of(db: sqlite3.Connection, session: int, turn: int) -> TurnMarkRecord | None:
    row = db.execute(
        "SELECT data FROM contents WHERE session = ? AND turn = ? AND what = 'mark'", (session, turn)
    ).fetchone()
    return None if row is None else _MARK.validate_json(row["data"])


def take_revisions(db: sqlite3.Connection, session: int, turn: int) -> list[TurnMarkRecord]:
    """Remove the revisions of a turn's mark, and return them in their order."""
    values = (session, turn)
    rows = db.execute(f"SELECT data {_REVISIONS} ORDER BY id", values).fetchall()
    db.execute(f"DELETE {_REVISIONS}", values)
    return [_MARK.validate_json(row["data"]) for row in rows]


def put_metadata(db: sqlite3.Connection, session: int, metadata: Mapping[str, Any]) -> None:
    if metadata:
        put(db, session, NO_TURN, "metadata", to_json(dict(metadata)))


def metadata(db: sqlite3.Connection, session: int) -> dict[str, Any]:
    row = db.execute(_OF_TURN, (session, NO_TURN)).fetchone()
    return {} if row is None else from_json(row["data"])


def with_content(db: sqlite3.Connection, row: sqlite3.Row) -> TurnRecord:
    """Return the turn of this row of `turns`, joined with its `session_id`."""
    return _turn(row, db.execute(_OF_TURN, (row["session"], row["turn"])))


def of_session(db: sqlite3.Connection, session: int, rows: Sequence[sqlite3.Row], first: int) -> list[TurnRecord]:
    """Return the turns of these rows, which are all of one session from `first` on."""
    found: dict[int, list[sqlite3.Row]] = {}
    for content in db.execute(_FROM_TURN, (session, first)):
        found.setdefault(content["turn"], []).append(content)
    return [_turn(row, found.get(row["turn"], ())) for row in rows]


def _turn(row: sqlite3.Row, contents: sqlite3.Cursor | Sequence[sqlite3.Row]) -> TurnRecord:
    by_kind = {content["what"]: content for content in contents}
    said = from_json(by_kind["turn"]["data"])
    return TurnRecord(
        session_id=row["session_id"],
        turn=row["turn"],
        kind=TurnKind(row["kind"]),
        answer=said["answer"],
        version=row["version"],
        truncated=bool(row["truncated"]),
        malformed=row["malformed"],
        calls=tuple(said["calls"]),
        recorded_at=row["recorded_at"],
        delivered=bool(row["delivered"]),
        mask=None if row["mask"] is None else MaskReason(row["mask"]),
        body=by_kind["turn"]["body"],
        next_state=_STATE.validate_json(by_kind["state"]["data"]) if "state" in by_kind else None,
        mark=_MARK.validate_json(by_kind["mark"]["data"]) if "mark" in by_kind else None,
        part=row["part"],
        dropped=None if row["dropped"] is None else MaskReason(row["dropped"]),
    )
