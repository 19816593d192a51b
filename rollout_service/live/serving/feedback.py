"""The feedback of users on answers. Guarantee: it overrides the judge, once; the same again changes nothing."""

from __future__ import annotations

from api_schemas.rollouts.sessions import MarkReason, TurnKind
from api_schemas.sessions import FeedbackAnswer, SessionFeedback
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.live.contract import LiveStore, NextStateRecord, TurnMarkRecord, TurnRecord
from rollout_service.live.recorder import RecordingParts


async def take_feedback(parts: RecordingParts, session_id: str, feedback: SessionFeedback) -> FeedbackAnswer:
    """Set a turn's value to its user's.

    Raises:
        NotFoundError: There is no such turn.
        ConflictError: The user said something else of it before.
    """
    turn = await _find(parts.store, session_id, feedback.turn)
    before = turn.mark
    is_revised = turn.part is not None or turn.dropped is not None
    answer = FeedbackAnswer(turn=turn.turn, value=feedback.value, revised=is_revised)
    if before is not None and before.reason is MarkReason.EXPLICIT:
        if before.value != feedback.value:
            raise ConflictError(
                f"turn {turn.turn} has feedback with another value",
                hint="Feedback that was given stays as it is.",
                context={"value": before.value},
            )
        return answer
    await _set(parts, turn, feedback)
    if before is not None and before.value is not None:
        parts.metrics.compared(judged=before.value, explicit=feedback.value)
    return answer


async def _find(store: LiveStore, session_id: str, number: int | None) -> TurnRecord:
    if number is not None:
        turn = await store.turn(session_id, number)
    else:
        turns = await store.turns(session_id)
        main = [each for each in turns if each.delivered and each.kind is TurnKind.MAIN]
        turn = main[-1] if main else None
    if turn is None:
        named = f"no turn {number}" if number is not None else "no main turn that was delivered"
        raise NotFoundError(
            f"the session has {named}", hint="GET /v1/sessions/{session_id} lists its recorded turns."
        )
    return turn


async def _set(parts: RecordingParts, turn: TurnRecord, feedback: SessionFeedback) -> None:
    now = parts.clock()
    if feedback.text and turn.next_state is None:
        if found := await parts.detectors.search([feedback.text]):
            parts.metrics.redacted(found)
        else:
            state = NextStateRecord(role="user", text=feedback.text, arrived_at=now)
            await parts.store.follow(turn.session_id, turn.turn, state)
    mark = TurnMarkRecord(value=feedback.value, reason=MarkReason.EXPLICIT, source="explicit", at=now)
    await parts.store.mark(turn.session_id, turn.turn, mark)
    parts.rated(turn.session_id, turn.turn)
    parts.metrics.judged(turn, mark)
