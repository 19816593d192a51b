"""Stored sessions and turns as the API shows them."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from api_schemas.errors import FieldError
from api_schemas.rollouts.sessions import MaskReason, NextState, TurnMark
from api_schemas.sessions import LiveSession, SessionCounts, SessionPart, SessionState
from rollout_service.base.errors import InvalidFieldError
from rollout_service.live.contract import NextStateRecord, PartRecord, SessionRecord, TurnRecord

_DROPPED = "dropped:"


def show_counts(counts: Mapping[str, int]) -> SessionCounts:
    """Return the numbers of turns of a store."""
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
        opened_at=_time(session.opened_at),
        used_at=_time(session.used_at),
        closed_at=None if session.closed_at is None else _time(session.closed_at),
        closed_because=session.closed_because,
        parts=parts,
        counts=counts,
    )


def show_part(part: PartRecord) -> SessionPart:
    """Return where a part of a session went."""
    return SessionPart(
        part=part.part,
        run_id=part.run_id,
        rollout_id=part.rollout_id,
        turns=list(part.usable),
        closed_at=_time(part.closed_at),
    )


def show_turn(turn: TurnRecord) -> TurnMark:
    """Return the mark of a turn so far; one about which nothing is decided has no reason yet."""
    mark = turn.mark
    because = turn.dropped or turn.mask
    return TurnMark(
        turn=turn.turn,
        kind=turn.kind,
        usable=because is None and (turn.part is not None or (mark is not None and mark.value is not None)),
        masked_because=because,
        value=mark.value if mark is not None else None,
        reason=mark.reason if mark is not None else None,
        source=mark.source if mark is not None else None,
        votes=mark.votes if mark is not None else None,
        judge=mark.judge if mark is not None else None,
        next_state=_next_state(turn.next_state) if turn.next_state is not None else None,
        hint=mark.hint if mark is not None else None,
    )


def _next_state(state: NextStateRecord) -> NextState:
    text = state.text.encode("utf-8", "surrogatepass")
    return NextState(role=state.role, chars=len(state.text), sha256=hashlib.sha256(text).hexdigest())


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# Where a page of sessions ends, as a text for its reader.


def encode_cursor(last: tuple[float, str]) -> str:
    """Return the cursor of the page after this session, by the time of its opening and its id."""
    return urlsafe_b64encode(orjson.dumps(last)).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Return the session after which a page begins.

    Raises:
        InvalidFieldError: It is not the cursor of a page.
    """
    try:
        opened_at, session_id = orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        last = float(opened_at), str(session_id)
        if encode_cursor(last) == cursor:  # the decoder skips characters, and a time may be NaN
            return last
    except (ValueError, TypeError):
        pass
    raise InvalidFieldError([FieldError(path="query.cursor", message="is not the `next_cursor` of a page")])
