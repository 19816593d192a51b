"""A text is a value of its schema, and stays as it is where it may."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.tokens.arguments import read_value, types_of

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
PYTHON = {"True": True, "False": False, "None": None}
ROOT = {
    "$defs": {
        "Color": {"enum": ["red", "1"]},
        "a/b": INTEGER,
        "Tree": {"anyOf": [NULL, {"$ref": "#/$defs/Tree"}]},
        "Loop": {"$ref": "#/$defs/Loop"},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (STRING, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"enum": [("a", "b")]}, {"string"}),
        ({"anyOf": [STRING, {"oneOf": [INTEGER, NULL]}]}, {"string", "integer", "null"}),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "description": "d"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/Tree"}, {"null"}),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/$defs/missing"}, None),
        ({"$ref": "https://example.org/schema"}, None),
        ({"anyOf": [STRING, {}]}, None),
        ({"anyOf": []}, None),
        ({"anyOf": 1, "enum": "ab", "type": 5}, None),
        ({}, None),
        (True, None),
        (None, None),
    ],
)
def test_a_schema_says_its_types_by_name_by_values_or_by_reference(schema, types):
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (' {"a": 1}\n', {"string"}, ' {"a": 1}\n'),
        ("02134", {"string", "null"}, "02134"),
        ("5", {"string", "null"}, "5"),
        ("5", {"string", "integer"}, 5),
        ("5", {"string", "number"}, 5),
        ("1.0", {"string", "integer"}, "1.0"),
        ('{"a": 1}', {"string", "null"}, '{"a": 1}'),
        ("null", {"string", "null"}, None),
        ("None", {"string", "null"}, None),
        ("None", {"string"}, "None"),
        (" True\n", {"boolean"}, True),
        ("True", None, "True"),
        ("\n[1, null]\n", {"array"}, [1, None]),
        ("[1]", {"object"}, [1]),  # the tool says what is wrong with it
        ('"q"', None, '"q"'),
        (" text ", None, " text "),
        (" 5 ", None, 5),
        ("NaN", {"string", "number"}, "NaN"),
        ("1e999", {"string", "number"}, "1e999"),
        ("1" * 5000, {"string", "integer"}, "1" * 5000),
        ("[" * 100_000, {"string", "array"}, "[" * 100_000),
    ],
)
def test_a_text_is_another_type_only_where_the_schema_allows_that(text, types, value):
    assert repr(read_value(text, types, PYTHON)) == repr(value)


@pytest.mark.parametrize("text", ["five", "", "True", "NaN", "Infinity", "1e999", "[1", "1" * 5000])
def test_a_text_that_can_be_no_value_is_refused(text):
    with pytest.raises(ValueError, match="not JSON"):
        read_value(text, {"integer", "array", "boolean"}, {})


@given(st.text(max_size=8))
def test_a_string_is_never_changed(text):
    assert read_value(text, {"string"}, PYTHON) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner | st.text(max_size=4), max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_json_keeps_its_type(value):
    assert repr(read_value(json.dumps(value), None, {})) == repr(value)
