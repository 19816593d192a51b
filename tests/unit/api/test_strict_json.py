"""Only JSON that can be stored and sent on unchanged is accepted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base import strict_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.slow
@given(VALUES)
def test_what_can_be_stored_is_read_as_it_is(value):
    text = json.dumps(value)
    assert strict_json.parse(text.encode()) == value


@pytest.mark.parametrize(
    "number", ["1e309", "-1E+400", "1e0309", '[1, {"a": 2e999}]', "1" + "0" * 309 + ".5", "NaN", "-Infinity"]
)
def test_numbers_beyond_the_range_are_refused(number):
    with pytest.raises(ValueError):
        strict_json.parse(number.encode())


def test_a_text_that_looks_like_such_a_number_is_a_text():
    assert strict_json.parse(b'["1e999", 1.5e300]') == ["1e999", 1.5e300]


@pytest.mark.parametrize("text", ['"\\ud800"', "[" * 101 + "]" * 101, "{", ""])
def test_other_documents_that_cannot_be_stored_are_refused(text):
    with pytest.raises(ValueError):
        strict_json.parse(text.encode())


@given(VALUES, st.integers(0, 8))
def test_commas_and_brackets_are_counted_outside_of_texts(value, most):
    document = json.dumps(value).encode()
    plain = json.dumps(_without_texts(value))
    assert strict_json.has_more(document, b",{[", most) == (sum(map(plain.count, ",{[")) > most)


def _without_texts(value: object) -> object:
    if isinstance(value, str):
        return ""
    if isinstance(value, list):
        return [_without_texts(item) for item in value]
    if isinstance(value, dict):
        return {str(number): _without_texts(item) for number, item in enumerate(value.values())}
    return value


@given(st.binary(max_size=40), st.integers(0, 8))
def test_any_bytes_are_counted(document, most):
    assert not strict_json.has_more(document, b",{[", max(most, len(document)))
    strict_json.has_more(document, b",{[", most)
