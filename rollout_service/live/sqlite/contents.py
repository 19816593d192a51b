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

MarkKind: TypeAlias = Literal["mark", "revision"]
What: TypeAlias = Literal["turn", "state", "metadata"] | MarkKind

NO_TURN = -1
"""Stands for the session itself."""

_MARK = TypeAdapter(TurnMarkRecord)
_STATE = TypeAdapter(NextStateRecord)

_PUT = """
INSERT INTO contents (session, turn, what, padding, data, body)
VALUES (:session, :turn, :what, zeroblob(:padding), :data, :body)
"""
_OF_TURN = "SELECT turn, what, data, body FROM contents WHERE session = ? AND turn = ?"
_TAKE = "DELETE FROM contents WHERE session = ? AND turn = ? AND what = ? RETURNING id, data"
_ADD_BYTES = "UPDATE sessions SET bytes = bytes + ? WHERE seq = ?"
_FROM_TURN = "SELECT turn, what, data, body FROM contents WHERE session = ? AND turn >= ? ORDER BY turn"


def put(db: sqlite3.Connection, session: int, turn: int, what: What, data: bytes, body: bytes | None = None) -> None:
    """Add it to the session's size, too."""
    values = {"session": session, "turn": turn, "what": what, "data": data, "body": body}
    db.execute(_PUT, values | {"padding": PAGE_SIZE})
    db.execute(_ADD_BYTES, (len(data) + len(body or b""), session))


def put_turn(db: sqlite3.Connection, session: int, turn: TurnRecord) -> None:
    put(db, session, turn.turn, "turn", to_json({"answer": turn.answer, "calls": turn.calls}), turn.body)


def put_state(db: sqlite3.Connection, session: int, turn: int, state: NextStateRecord) -> None:
    put(db, session, turn, "state", _STATE.dump_json(state))


def put_mark(db: sqlite3.Connection, session: int, turn: int, mark: TurnMarkRecord, what: MarkKind = "mark") -> None:
    """Put a mark in the place of one that was taken."""
    put(db, session, turn, what, _MARK.dump_json(mark))


def take_mark(db: sqlite3.Connection, session: int, turn: int, what: MarkKind = "mark") -> TurnMarkRecord | None:
    """Remove a mark, and return it; of several revisions, which earlier releases kept, the last."""
    rows = db.execute(_TAKE, (session, turn, what)).fetchall()
    db.execute(_ADD_BYTES, (-sum([len(row["data"]) for row in rows]), session))
    last = max(rows, key=lambda row: row["id"], default=None)
    return None if last is None else _MARK.validate_json(last["data"])


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
