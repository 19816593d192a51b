"""The statements on parts; each function runs inside one transaction, in the database's thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from rollout_service.live.contract import PartRecord, PendingTurn
from rollout_service.live.sqlite.session_statements import find

_DECIDE = """
UPDATE turns SET part = :part, dropped = :dropped
WHERE session = :session AND turn = :turn AND part IS NULL AND dropped IS NULL
"""
_TAKE = """
INSERT INTO parts (session, part, run_id, usable, closed_at)
SELECT :session, (SELECT coalesce(max(part) + 1, 0) FROM parts WHERE session = :session), :run, :usable, :at
RETURNING part
"""
_SELECT = "SELECT parts.*, sessions.session_id FROM parts JOIN sessions ON sessions.seq = parts.session"
_PARTS = f"""
{_SELECT} WHERE (:run IS NULL OR run_id = :run) AND (NOT :unsubmitted OR "offset" IS NULL)
    AND (:id IS NULL OR session_id = :id)
ORDER BY parts.seq
"""
_ONE = f"{_SELECT} WHERE session_id = ? AND part = ?"
_FATES = """
SELECT session_id, turns.* FROM turns JOIN sessions ON sessions.seq = turns.session
WHERE session_id IN (SELECT value FROM json_each(?)) AND part IS NULL AND dropped IS NULL
ORDER BY session, turn
"""
_UNDO = """
UPDATE turns SET part = NULL, dropped = NULL
WHERE session = (SELECT session FROM parts WHERE seq = :seq) AND part = (SELECT part FROM parts WHERE seq = :seq)
"""
_SET_OFFSET = """
UPDATE parts SET "offset" = :offset
WHERE session = (SELECT seq FROM sessions WHERE session_id = :id) AND part = :part
"""


def take(
    db: sqlite3.Connection,
    session_id: str,
    run_id: str | None,
    usable: Sequence[int],
    dropped: Mapping[int, MaskReason],
    at: float,
) -> PartRecord | None:
    """Put turns into a new part, or decide them without one if none is usable."""
    session = find(db, session_id)
    if session is None or not _all_undecided(db, session["seq"], [*usable, *dropped]):
        return None
    part = None
    if usable:
        values = {"session": session["seq"], "run": run_id, "usable": json.dumps(sorted(usable)), "at": at}
        part = db.execute(_TAKE, values).fetchone()["part"]
    reasons: dict[int, MaskReason | None] = dict.fromkeys(usable) | dict(dropped)
    for turn, reason in reasons.items():
        db.execute(_DECIDE, {"session": session["seq"], "turn": turn, "part": part, "dropped": reason})
    return None if part is None else _part(db.execute(_ONE, (session_id, part)).fetchone())


def _all_undecided(db: sqlite3.Connection, session: int, turns: Sequence[int]) -> bool:
    rows = db.execute(
        "SELECT turn FROM turns WHERE session = ? AND part IS NULL AND dropped IS NULL", (session,)
    )
    return {row["turn"] for row in rows} >= set(turns)


def fates(db: sqlite3.Connection, session_ids: Sequence[str]) -> dict[str, list[PendingTurn]]:
    """Return the turns of each session that are in no part."""
    found: dict[str, list[PendingTurn]] = {}
    for row in db.execute(_FATES, (json.dumps(list(session_ids)),)):
        found.setdefault(row["session_id"], []).append(_fate(row))
    return found


def _fate(row: sqlite3.Row) -> PendingTurn:
    return PendingTurn(
        turn=row["turn"],
        kind=TurnKind(row["kind"]),
        recorded_at=row["recorded_at"],
        delivered=bool(row["delivered"]),
        mask=None if row["mask"] is None else MaskReason(row["mask"]),
        followed_at=row["followed_at"],
        marked_at=row["marked_at"],
        value=row["value"],
    )


def give_back(db: sqlite3.Connection, session_id: str, part: int) -> bool:
    """Undo a part that has no offset."""
    row = db.execute(_ONE, (session_id, part)).fetchone()
    if row is None or row["offset"] is not None or row["rollout_id"] is not None:
        return False
    db.execute(_UNDO, {"seq": row["seq"]})
    db.execute("DELETE FROM parts WHERE seq = ?", (row["seq"],))
    return True


def parts(
    db: sqlite3.Connection, run_id: str | None, session_id: str | None, *, unsubmitted: bool
) -> list[PartRecord]:
    """Return parts, the oldest first."""
    rows = db.execute(_PARTS, {"run": run_id, "id": session_id, "unsubmitted": unsubmitted})
    return [_part(row) for row in rows]


def set_offset(db: sqlite3.Connection, session_id: str, part: int, offset: int | None) -> None:
    """Keep the number of a part's task."""
    values = {"id": session_id, "part": part, "offset": offset}
    db.execute(_SET_OFFSET, values)


def claim(db: sqlite3.Connection, parts: Sequence[tuple[str, int]], rollout_id: str) -> PartRecord | None:
    """Give a rollout the part that it has, or else the first that is free."""
    rows = [row for one in parts if (row := db.execute(_ONE, one).fetchone()) is not None]
    own = [row for row in rows if row["rollout_id"] == rollout_id]
    if own:
        return _part(own[0])
    for row in rows:
        if row["rollout_id"] is None:
            db.execute("UPDATE parts SET rollout_id = ? WHERE seq = ?", (rollout_id, row["seq"]))
            return _part(db.execute(_ONE, (row["session_id"], row["part"])).fetchone())
    return None


def _part(row: sqlite3.Row) -> PartRecord:
    return PartRecord(
        session_id=row["session_id"],
        part=row["part"],
        run_id=row["run_id"],
        usable=tuple(json.loads(row["usable"])),
        offset=row["offset"],
        rollout_id=row["rollout_id"],
        closed_at=row["closed_at"],
    )
