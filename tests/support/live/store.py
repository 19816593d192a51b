"""Sessions and turns for tests of stores of live sessions."""

from typing import Any

from api_schemas.rollouts.sessions import MarkReason, TurnKind
from rollout_service.live.contract import NextStateRecord, SessionRecord, TurnMarkRecord, TurnRecord


def a_session(session_id: str = "s", **values: Any) -> SessionRecord:
    defaults: dict[str, Any] = {
        "key_hash": b"",
        "pool": "policy",
        "user": "u",
        "tenant": "default",
        "train": True,
        "explicit": True,
        "retention_seconds": 1_000.0,
        "opened_at": 0.0,
        "used_at": 0.0,
    }
    return SessionRecord(session_id=session_id, **defaults | values)


def a_turn(turn: int = 0, session_id: str = "s", **values: Any) -> TurnRecord:
    defaults: dict[str, Any] = {
        "kind": TurnKind.MAIN,
        "answer": f"answer {turn}",
        "version": 1,
        "truncated": False,
        "malformed": 0,
        "recorded_at": float(turn),
        "body": b"body %d" % turn,
    }
    return TurnRecord(session_id=session_id, turn=turn, **defaults | values)


def a_state(text: str = "thanks", at: float = 1.0) -> NextStateRecord:
    return NextStateRecord(role="user", text=text, arrived_at=at)


def judged(value: float | None = 1.0, **values: Any) -> TurnMarkRecord:
    reason = MarkReason.MAJORITY if value is not None else MarkReason.ALL_FAILED
    defaults: dict[str, Any] = {"value": value, "reason": reason, "source": "judge", "at": 2.0}
    return TurnMarkRecord(**defaults | values)


def explicit(value: float) -> TurnMarkRecord:
    return TurnMarkRecord(value=value, reason=MarkReason.EXPLICIT, source="explicit", at=3.0)
