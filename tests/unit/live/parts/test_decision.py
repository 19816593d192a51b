"""Which turns of a session are trained on, and why the others are not."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.sessions import MaskReason, TurnKind
from api_schemas.runs.live import LiveDelivery
from rollout_service.live.contract import PendingTurn
from rollout_service.live.parts.work import DecisionTime, TurnDecision, decide
from tests.support.live.store import a_session

NOW = 100.0
JUDGE_IS_ON = DecisionTime(NOW, judging_since=0.0)
JUDGE_IS_OFF = DecisionTime(NOW, judging_since=None)
ENDED = a_session(closed_at=99.0)
OPEN = a_session()
ORDER = LiveDelivery(close_turns=2)


def fate(turn: int, **values: Any) -> PendingTurn:
    defaults: dict[str, Any] = {
        "kind": TurnKind.MAIN,
        "recorded_at": 90.0,
        "delivered": True,
        "mask": None,
        "followed_at": 95.0,
        "marked_at": 99.0,
        "value": 1.0,
    }
    return PendingTurn(turn=turn, **defaults | values)


def unjudged(turn: int, **values: Any) -> PendingTurn:
    return fate(turn, **{"marked_at": None, "value": None} | values)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (fate(0, kind=TurnKind.SIDE), MaskReason.SIDE),
        (fate(0, mask=MaskReason.SUPERSEDED), MaskReason.SUPERSEDED),
        (fate(0, mask=MaskReason.REDACTED), MaskReason.REDACTED),
        (fate(0, mask=MaskReason.FOREIGN), MaskReason.FOREIGN),
        (fate(0, delivered=False), MaskReason.UNDELIVERED),
        (unjudged(0, followed_at=None), MaskReason.NO_NEXT_STATE),
        (fate(0, value=None), MaskReason.JUDGE_FAILED),
        (unjudged(0, followed_at=30.0), MaskReason.JUDGE_FAILED),
        (fate(0, value=0.0), MaskReason.ZERO),
    ],
)
def test_a_turn_that_is_not_usable_says_why(turn, reason):
    assert decide(ENDED, [turn], ORDER, JUDGE_IS_ON) == TurnDecision((), {0: reason})


def test_bad_turns_are_trained_on():
    assert decide(ENDED, [fate(0, value=-1.0)], ORDER, JUDGE_IS_ON) == TurnDecision((0,))


def test_the_last_turn_is_usable_if_its_user_says_so():
    last = fate(1, followed_at=None, value=0.5)
    assert decide(ENDED, [fate(0), last], ORDER, JUDGE_IS_ON) == TurnDecision((0, 1))


def test_a_turn_is_judged_and_not_trained_on_in_quarantine():
    new = replace(ENDED, quarantined=True)
    assert decide(new, [fate(0)], ORDER, JUDGE_IS_ON) == TurnDecision((), {0: MaskReason.QUARANTINED})
    assert decide(new, [unjudged(0)], ORDER, JUDGE_IS_ON) is None


def test_an_open_session_closes_after_as_many_judged_turns_as_asked_for():
    turns = [fate(0), fate(1, kind=TurnKind.SIDE), unjudged(2, followed_at=None)]
    assert decide(OPEN, turns, ORDER, JUDGE_IS_ON) is None
    turns += [fate(3), unjudged(4), unjudged(5, followed_at=None)]
    decided = decide(OPEN, turns, ORDER, JUDGE_IS_ON)
    assert decided == TurnDecision((0, 3), {1: MaskReason.SIDE})  # what may still change waits


def test_an_open_session_closes_some_time_after_its_first_judged_turn():
    order = LiveDelivery(close_turns=9, close_seconds=5.0)
    assert decide(OPEN, [fate(0, marked_at=96.0)], order, JUDGE_IS_ON) is None
    assert decide(OPEN, [fate(0, marked_at=95.0), fate(1)], order, JUDGE_IS_ON) == TurnDecision((0, 1))


def test_a_part_waits_for_the_judge_only_as_long_as_it_may():
    order = LiveDelivery(close_turns=2, judge_seconds=10.0)
    turns = [fate(0), unjudged(1, followed_at=95.0), fate(2)]
    assert decide(OPEN, turns, order, JUDGE_IS_ON) is None
    assert decide(ENDED, turns, order, JUDGE_IS_ON) is None
    late = TurnDecision((0, 2), {1: MaskReason.JUDGE_FAILED})
    assert decide(OPEN, turns, order, DecisionTime(105.0, 0.0)) == late
    assert decide(ENDED, turns, order, DecisionTime(105.0, 0.0)) == late


def test_no_turn_fails_because_the_judge_is_stopped():
    turns = [fate(0), unjudged(1), fate(2)]
    assert decide(ENDED, turns, ORDER, DecisionTime(1_000.0, None)) is None
    assert decide(ENDED, turns, ORDER, DecisionTime(1_000.0, judging_since=950.0)) is None
    decided = decide(ENDED, turns, ORDER, DecisionTime(1_090.0, None))  # it is not kept for longer than this
    assert decided == TurnDecision((0, 2), {1: MaskReason.JUDGE_FAILED})


@pytest.mark.parametrize(
    ("zeros", "values", "usable"),
    [
        ("drop", [0.0, 0.0], ()),
        ("keep", [0.0, 1.0], (0, 1)),
        ("at_least_one", [0.0, 0.0, 0.0], (2,)),
        ("at_least_one", [0.0, -1.0, 0.0], (1,)),
    ],
)
def test_ambiguous_turns_are_treated_as_the_run_asks(zeros, values, usable):
    turns = [fate(number, value=value) for number, value in enumerate(values)]
    decided = decide(ENDED, turns, LiveDelivery(zeros=zeros), JUDGE_IS_ON)
    assert decided.usable == usable
    assert set(decided.dropped.values()) <= {MaskReason.ZERO}


def test_a_group_of_sessions_is_decided_at_their_ends():
    turns = [fate(number) for number in range(9)]
    assert decide(OPEN, turns, ORDER, JUDGE_IS_ON, whole=True) is None
    assert decide(ENDED, turns, ORDER, JUDGE_IS_ON, whole=True) == TurnDecision(tuple(range(9)))


def test_without_a_run_turns_wait_as_long_as_they_are_kept():
    turns = [fate(0), fate(1, kind=TurnKind.SIDE), unjudged(2)]
    assert decide(OPEN, turns, None, JUDGE_IS_ON) is None
    assert decide(ENDED, turns, None, JUDGE_IS_ON) == TurnDecision((), {1: MaskReason.SIDE})
    reasons = {0: MaskReason.NO_RUN, 1: MaskReason.SIDE, 2: MaskReason.JUDGE_FAILED}
    assert decide(OPEN, turns, None, DecisionTime(1_090.0, 0.0)) == TurnDecision((), reasons)


FATES = st.builds(
    fate,
    turn=st.just(0),
    kind=st.sampled_from(TurnKind),
    recorded_at=st.sampled_from([0.0, 90.0]),
    delivered=st.booleans(),
    mask=st.none() | st.sampled_from([MaskReason.REDACTED, MaskReason.SUPERSEDED]),
    followed_at=st.none() | st.sampled_from([10.0, 95.0]),
    marked_at=st.none() | st.sampled_from([20.0, 99.0]),
    value=st.none() | st.sampled_from([-1.0, 0.0, 1.0]),
).map(lambda turn: turn if turn.marked_at is not None else replace(turn, value=None))
SESSIONS = st.sampled_from([OPEN, ENDED, replace(ENDED, quarantined=True)])
ORDERS = st.builds(
    LiveDelivery,
    zeros=st.sampled_from(["drop", "keep", "at_least_one"]),
    close_turns=st.integers(1, 4),
    close_seconds=st.sampled_from([1.0, 1_000.0]),
)


@given(SESSIONS, st.lists(FATES, max_size=8), st.none() | ORDERS, st.sampled_from([JUDGE_IS_ON, JUDGE_IS_OFF]))
def test_only_judged_turns_are_usable_whatever_happened(session, fates, order, moment):
    turns = [replace(turn, turn=number) for number, turn in enumerate(fates)]
    decided = decide(session, turns, order, moment)
    if decided is None:
        return
    assert not set(decided.usable) & decided.dropped.keys()
    assert {*decided.usable, *decided.dropped} <= {turn.turn for turn in turns}
    for number in decided.usable:
        turn = turns[number]
        assert order is not None
        assert (turn.kind, turn.delivered, turn.mask) == (TurnKind.MAIN, True, None)
        assert turn.value is not None
        assert not session.quarantined
    if session.closed_at is not None and order is not None:
        assert len(decided.usable) + len(decided.dropped) == len(turns)
        bad = {turn.turn for turn in turns if turn.value == -1.0 and turn.turn in decided.dropped}
        reasons = {decided.dropped[number] for number in bad}
        assert not reasons & {MaskReason.ZERO, MaskReason.NO_NEXT_STATE, MaskReason.JUDGE_FAILED}
