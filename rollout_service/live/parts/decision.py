"""Which turns of a session are decided now: those to train on, and why not the others. Pure functions.

Guarantees: the same turns, session, order and time always give the same decision; no turn is left out because it is
bad; a turn whose fate may still change is decided only when its session is over, or its time is up.

A turn is usable if its client got it, it has a value, and nothing rules it out. An open session is closed *for
training* from time to time, up to its newest judged turn. Once it has ended, all of its turns are decided together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from api_schemas.runs.live import LiveDelivery
from rollout_service.live.contract import SessionRecord, TurnFate


@dataclass(frozen=True, slots=True)
class TurnDecision:
    """What becomes of some turns of a session."""

    usable: tuple[int, ...] = ()
    dropped: Mapping[int, MaskReason] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """When turns are looked at."""

    now: float
    judging_since: float | None
    """Since when the judge is at work; None while it is not, so that no turn fails for want of it."""


def decide(
    session: SessionRecord,
    turns: Sequence[TurnFate],
    order: LiveDelivery | None,
    moment: Moment,
    *,
    whole: bool = False,
) -> TurnDecision | None:
    """Return what becomes of a session's undecided turns; None if nothing is to be decided now.

    `order` is that of the run which takes the session, None if none does. With `whole`, nothing is decided before the
    session has ended.
    """
    if order is None:
        return _without_run(session, turns, moment)
    due = [turn for turn in turns if _is_due(turn)]
    if session.closed_at is not None:
        if any(not _is_late(turn, session, order, moment) for turn in due):
            return None
        return _decision(session, turns, order)
    judged = [turn for turn in turns if _is_judged(turn)]
    if whole or not judged or not _closes(judged, order, moment.now):
        return None
    taken = [turn for turn in turns if turn.turn <= judged[-1].turn and not _may_change(turn)]
    waiting = [turn for turn in due if turn.turn < judged[-1].turn]
    if any(not _is_late(turn, session, order, moment) for turn in waiting):
        return None
    return _decision(session, sorted([*taken, *waiting], key=lambda turn: turn.turn), order)


def _without_run(session: SessionRecord, turns: Sequence[TurnFate], moment: Moment) -> TurnDecision | None:
    """Decide the turns of a session that no run takes: what can never be trained on, and what was kept too long."""
    old = {
        turn.turn: _reason(session, turn) or MaskReason.NO_RUN
        for turn in turns
        if turn.recorded_at + session.retention_seconds <= moment.now
    }
    if session.closed_at is not None:
        certain = ((turn.turn, _reason(session, turn)) for turn in turns if not _is_due(turn))
        old |= {turn: reason for turn, reason in certain if reason is not None}
    return TurnDecision(dropped=old) if old else None


def _decision(session: SessionRecord, turns: Sequence[TurnFate], order: LiveDelivery) -> TurnDecision | None:
    dropped = {turn.turn: reason for turn in turns if (reason := _reason(session, turn)) is not None}
    judged = [turn for turn in turns if turn.turn not in dropped]
    zeros = [turn.turn for turn in judged if turn.value == 0 and order.zeros != "keep"]
    if order.zeros == "at_least_one" and len(zeros) == len(judged):
        zeros = zeros[:-1]  # the last has the most judged turns before it
    dropped |= dict.fromkeys(zeros, MaskReason.ZERO)
    usable = tuple(turn.turn for turn in judged if turn.turn not in dropped)
    return TurnDecision(usable, dropped) if usable or dropped else None


def _reason(session: SessionRecord, turn: TurnFate) -> MaskReason | None:
    """Return why a turn is not usable, as far as it is not for its value; None if it is judged."""
    if turn.kind is TurnKind.SIDE:
        return MaskReason.SIDE
    if turn.mask is not None:
        return turn.mask
    if not turn.delivered:
        return MaskReason.UNDELIVERED
    if turn.value is None:
        is_unanswered = turn.followed_at is None and turn.marked_at is None
        return MaskReason.NO_NEXT_STATE if is_unanswered else MaskReason.JUDGE_FAILED
    return MaskReason.QUARANTINED if session.quarantined else None


def _is_judged(turn: TurnFate) -> bool:
    return turn.value is not None and turn.delivered and turn.mask is None and turn.kind is TurnKind.MAIN


def _is_due(turn: TurnFate) -> bool:
    """Return whether a turn waits for the judge."""
    is_open = turn.kind is TurnKind.MAIN and turn.mask is None and turn.delivered
    return is_open and turn.followed_at is not None and turn.marked_at is None


def _may_change(turn: TurnFate) -> bool:
    """Return whether a turn of an open session may still be delivered, followed or judged."""
    if turn.kind is TurnKind.SIDE or turn.mask is not None:
        return False
    return not turn.delivered or turn.marked_at is None


def _is_late(turn: TurnFate, session: SessionRecord, order: LiveDelivery, moment: Moment) -> bool:
    """Return whether a due turn has waited for the judge as long as it may."""
    if moment.now >= turn.recorded_at + session.retention_seconds:
        return True
    if moment.judging_since is None:
        return False
    since = max(turn.followed_at or 0.0, moment.judging_since)
    return moment.now >= since + order.judge_seconds


def _closes(judged: Sequence[TurnFate], order: LiveDelivery, now: float) -> bool:
    first = min(turn.marked_at or 0.0 for turn in judged)
    return len(judged) >= order.close_turns or now >= first + order.close_seconds
