"""What a rollout tells about the turns of its part of a session."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from api_schemas.rollouts.sessions import NextState, SessionInfo, TurnMark
from rollout_service.live.contract import NextStateRecord, PartRecord, SessionRecord, TurnRecord


def session_info(session: SessionRecord, part: PartRecord) -> SessionInfo:
    """Return the session that a part belongs to."""
    return SessionInfo(
        session_id=session.session_id,
        user=session.user,
        tenant=session.tenant,
        continues=session.continues,
        closed_because=session.closed_because,
        opened_at=_when(session.opened_at),
        closed_at=None if session.closed_at is None else _when(session.closed_at),
        part=part.part,
    )


def turn_mark(turn: TurnRecord, part: PartRecord, *, with_text: bool) -> TurnMark:
    """Return what became of a turn of a part; `with_text` has the text of what followed it."""
    mark = turn.mark
    is_usable = turn.turn in part.usable
    return TurnMark(
        turn=turn.turn,
        kind=turn.kind,
        usable=is_usable,
        masked_because=None if is_usable else turn.dropped,
        value=None if mark is None or mark.value is None else float(mark.value),
        reason=None if mark is None else mark.reason,
        source=None if mark is None else mark.source,
        votes=None if mark is None else mark.votes,
        judge=None if mark is None else mark.judge,
        next_state=None if turn.next_state is None else _next_state(turn.next_state, with_text=with_text),
        hint=None if mark is None else mark.hint,
    )


def _next_state(state: NextStateRecord, *, with_text: bool) -> NextState:
    return NextState(
        role=state.role,
        chars=len(state.text),
        sha256=hashlib.sha256(state.text.encode(errors="surrogatepass")).hexdigest(),
        text=state.text if with_text else None,
    )


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
