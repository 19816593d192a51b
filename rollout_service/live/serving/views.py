"""Stored sessions and turns as the API shows them."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from api_schemas.rollouts.sessions import MaskReason, NextState, TurnMark
from api_schemas.sessions import LiveSession, SessionCounts, SessionPart, SessionState
from rollout_service.base.errors import InvalidFieldError
from rollout_service.live.contract import NextStateRecord, PartRecord, SessionRecord, TurnRecord

_DROPPED = "dropped:"


def show_counts(counts: Mapping[str, int]) -> SessionCounts:
    dropped = {
        MaskReason(name.removeprefix(_DROPPED)): count
        for name, count in counts.items()
        if name.startswith(_DROPPED) and count
    }
    names = ("served", "recorded", "judged", "delivered", "waiting")
    return SessionCounts(dropped=dropped, **{name: counts.get(name, 0) for name in names})


def show_session(session: SessionRecord, counts: SessionCounts, parts: int) -> LiveSession:
    return LiveSession(
        session_id=session.session_id,
        state=SessionState.OPEN if session.closed_at is None else SessionState.CLOSED,
        pool=session.pool,
        user=session.user,
        tenant=session.tenant,
        train=session.train,
        continues=session.continues,
        group=session.group,
        metadata=dict(session.metadata),
        opened_at=time_of(session.opened_at),
        used_at=time_of(session.used_at),
        closed_at=None if session.closed_at is None else time_of(session.closed_at),
        closed_because=session.closed_because,
        parts=parts,
        counts=counts,
    )


def show_part(part: PartRecord) -> SessionPart:
    return SessionPart(
        part=part.part,
        run_id=part.run_id,
        rollout_id=part.rollout_id,
        turns=list(part.usable),
        closed_at=time_of(part.closed_at),
    )


def show_turn(turn: TurnRecord) -> TurnMark:
    """Return the mark so far; an undecided turn has no reason yet."""
    mark, because = turn.mark, turn.dropped or turn.mask
    has_value = mark is not None and mark.value is not None
    return mark_of(turn, usable=because is None and (turn.part is not None or has_value), because=because)


def mark_of(turn: TurnRecord, *, usable: bool, because: MaskReason | None, with_text: bool = False) -> TurnMark:
    """Return the mark of a turn; with `with_text`, it has the text of the next state."""
    names = ("value", "reason", "source", "votes", "judge", "hint")
    state = turn.next_state
    return TurnMark(
        turn=turn.turn,
        kind=turn.kind,
        usable=usable,
        masked_because=because,
        next_state=None if state is None else _next_state(state, with_text=with_text),
        **{name: None if turn.mark is None else getattr(turn.mark, name) for name in names},
    )


def _next_state(state: NextStateRecord, *, with_text: bool) -> NextState:
    return NextState(
        role=state.role,
        chars=len(state.text),
        sha256=hashlib.sha256(state.text.encode("utf-8", "surrogatepass")).hexdigest(),
        text=state.text if with_text else None,
    )


def time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def encode_cursor(opened_at: float, session_id: str) -> str:
    return urlsafe_b64encode(orjson.dumps((opened_at, session_id))).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Return the opening time and id of the last page's last session.

    Raises:
        InvalidFieldError: It is not the cursor of a page.
    """
    try:
        opened_at, session_id = orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        last = float(opened_at), str(session_id)
        if encode_cursor(*last) == cursor:  # the decoder skips characters, and a time may be NaN
            return last
    except (ValueError, TypeError):
        pass
    raise InvalidFieldError.at("query.cursor", "is not the `next_cursor` of a page")
