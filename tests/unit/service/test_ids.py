"""Every id survives its text, and no other text is read as an id."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from api_schemas.base import RolloutId
from api_schemas.runs import BatchId as BatchIdField
from api_schemas.runs import RunId
from rollout_service.base.ids import BatchId, GroupId, SampleId

KINDS = (GroupId, SampleId, BatchId)
run_ids = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
numbers = st.integers(0, 10**9)
ids = st.one_of(
    st.builds(GroupId, run_ids, numbers),
    st.builds(SampleId, run_ids, numbers, numbers, numbers),
    st.builds(BatchId, run_ids, numbers),
)


@given(ids)
def test_an_id_survives_its_text(one):
    assert type(one).parse(str(one)) == one


@given(ids)
def test_an_id_is_valid_on_the_wire(one):
    assert TypeAdapter(RunId).validate_python(one.run) == one.run
    kind = BatchIdField if isinstance(one, BatchId) else RolloutId
    assert TypeAdapter(kind).validate_python(str(one)) == str(one)


@given(st.sampled_from(KINDS), st.text() | ids.map(str) | st.from_regex(r"\A[a-z0-9.b-]{0,12}\Z"))
def test_nothing_else_parses(kind, text):
    try:
        one = kind.parse(text)
    except ValueError:
        return
    assert str(one) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "r", "r.", ".1.2", "r.1.02", "r.1.2.0", "r.1.2.3.4", "r.1.2 ", "r.-1.2", "r.1.x", "a.b.1.2"),
        *("r.1.2\n", "\nr.1.2", "r.\u0661.2", "r.1.2.\u0662"),
    ],
)
def test_a_text_that_only_looks_like_a_sample_is_refused(text):
    with pytest.raises(ValueError, match="is not the id of a sample"):
        SampleId.parse(text)


def test_the_texts_are_those_that_users_have():
    assert str(GroupId("dapo-7b", 4)) == "dapo-7b.4"
    assert str(SampleId("dapo-7b", 4, 1)) == "dapo-7b.4.1"
    assert str(SampleId("dapo-7b", 4, 1, 2)) == "dapo-7b.4.1.2"
    assert str(BatchId("dapo-7b", 0)) == "dapo-7b.b0"
