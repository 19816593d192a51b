"""The marks of the turns of a part of a session come back as they were written, to those who asked for them."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import Rollout, RolloutRequest, TokenExtras
from api_schemas.rollouts.sessions import (
    Hint,
    JudgedBy,
    MarkReason,
    MaskReason,
    NextState,
    RolloutKind,
    SessionInfo,
    Teacher,
    TurnKind,
    TurnMark,
    Votes,
)
from api_schemas.tasks import Task
from rollout_service.base.errors import RecordLostError
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec.rollouts import Shown
from tests.support.store.trees import rollout
from tests.unit.store.test_trees import stored

NUMBERS = st.integers(0, 2**53)
REALS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=40)
TOKENS = st.lists(NUMBERS, max_size=5)
MARKS = st.lists(
    st.builds(
        TurnMark,
        turn=NUMBERS,
        kind=st.sampled_from(TurnKind),
        usable=st.booleans(),
        masked_because=st.none() | st.sampled_from(MaskReason),
        value=st.none() | st.floats(-1, 1),
        reason=st.none() | st.sampled_from(MarkReason),
        source=st.none() | TEXTS,
        votes=st.none() | st.builds(Votes, minus=NUMBERS, failed=NUMBERS),
        judge=st.none() | st.builds(JudgedBy, pool=st.just("judge"), model=TEXTS, prompt_hash=TEXTS),
        next_state=st.none()
        | st.builds(NextState, role=st.just("mixed"), chars=NUMBERS, sha256=TEXTS, text=st.none() | TEXTS),
        hint=st.none()
        | st.builds(Hint, text=TEXTS, prompt_ids=TOKENS, candidates=NUMBERS, selected_by=st.just("longest")),
        teacher=st.none()
        | st.builds(
            Teacher,
            model=TEXTS,
            logprobs=st.lists(REALS, max_size=5),
            top_ids=st.none() | st.lists(TOKENS, max_size=3),
            top_logprobs=st.none() | st.lists(st.lists(REALS, max_size=3), max_size=3),
        ),
    ),
    max_size=6,
)
INFO = SessionInfo(
    session_id="any text", user="hash", tenant="default", opened_at=datetime(2026, 1, 1, tzinfo=UTC), part=3
)
ASKED = TokenExtras(turn_marks=True)


def order(exports: TokenExtras) -> RolloutRequest:
    return RolloutRequest(rollout_id="r1", task=Task(environment="session", instance={}), exports=exports)


def part(marks: list[TurnMark]) -> Rollout:
    return rollout(nodes=[], work=None, kind=RolloutKind.SESSION, session=INFO, turn_marks=marks)


@given(MARKS)
def test_any_marks_come_back_to_those_who_asked(marks):
    row = stored(part(marks), order(ASKED))
    read = group_codec.decode_whole(row)
    assert (read.kind, read.session, read.turn_marks) == (RolloutKind.SESSION, INFO, marks)
    assert Rollout.model_validate_json(read.model_dump_json()) == read
    listed = rollout_codec.decode_rollout(row, Shown.WORK)
    assert (listed.session, listed.turn_marks) == (INFO, [])


@given(MARKS)
def test_others_see_nothing_of_a_session(marks):
    row = stored(part(marks), order(TokenExtras()))
    plain = stored(rollout(nodes=[], work=None), order(TokenExtras()))
    read = group_codec.decode_whole(row).model_dump_json()
    assert read == group_codec.decode_whole(plain).model_dump_json()
    assert rollout_codec.decode_rollout(row, Shown.ALL).turn_marks == marks


def test_a_task_has_none_of_the_fields():
    row = stored(rollout(nodes=[], work=None), order(ASKED))
    assert not {"kind", "session", "turn_marks"} & set(json.loads(row["result"]))
    assert not {"kind", "session", "turn_marks"} & set(json.loads(group_codec.decode_whole(row).model_dump_json()))


def test_damaged_marks_are_reported_with_their_rollout():
    row = stored(part([TurnMark(turn=0, usable=True)]), order(ASKED))
    row["result"] = row["result"].replace('"turn_marks":"', '"turn_marks":"x')
    with pytest.raises(RecordLostError, match="r1"):
        group_codec.decode_whole(row)
