"""Only JSON that can be stored and sent on unchanged is accepted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service import strict_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(VALUES)
def test_what_can_be_stored_is_read_as_it_is(value: object) -> None:
    text = json.dumps(value)
    assert strict_json.parse(text.encode()) == value


@pytest.mark.parametrize(
    "number", ["1e309", "-1E+400", "1e0309", '[1, {"a": 2e999}]', "1" + "0" * 309 + ".5", "NaN", "-Infinity"]
)
def test_numbers_beyond_the_range_are_refused(number: str) -> None:
    with pytest.raises(ValueError):
        strict_json.parse(number.encode())


def test_a_text_that_looks_like_such_a_number_is_a_text() -> None:
    assert strict_json.parse(b'["1e999", 1.5e300]') == ["1e999", 1.5e300]


@pytest.mark.parametrize("text", ['"\\ud800"', "[" * 101 + "]" * 101, "{", ""])
def test_other_documents_that_cannot_be_stored_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json.parse(text.encode())
