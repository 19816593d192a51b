"""A tool receives the arguments that were sampled, in every chat format: white space, line ends and types included."""

import json
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout_service.tokens import ChatRenderer
from rollout_service.tokens.arguments import SYNTAX, Tag, read_value, types_of
from rollout_service.tokens.tagged_text import text_lexemes, text_lexemes_of_the_library
from tests.support.tokens.calls import BY_PARSER, PARAMETERS, TOOL, written
from tests.support.tokens.chat_formats import (
    FAMILIES,
    control_tokens,
    load,
    shared,
    write_model,
    write_tokenizer,
)

SINGLE_CALL = {"llama-3", "gpt-oss"}
"""Formats that write one call in a turn."""
QUOTES = {"gemma4": ('<|"|>',), "deepseek-v4": ("\uff5cDSML\uff5c",)}
"""Texts that end a value wherever they stand, or make its call malformed."""
TEXTS = [
    *("    if x:\n        return 1\n", "\ta", "a\n", "\n\na\n\n", " a ", "", " ", "\n", "\n\n", "\t"),
    *("\r\n", "a\r\nb\r\n", "\ra", "\xa0a\u2028", "日本🙂 é", "\x00\x1b[0m", "\x0b\x0c"),
    *('{"a": 1}', "[1]", '"quoted"', "null", "None", "true", "True", "02134", "1.50", "NaN", "5"),
    *("<b>bold</b>", "<a/>", "a</parameter>b", "<parameter=a>1</parameter>", "</arg_value>", "</function>"),
    *('<invoke name="write"></invoke>', "</invoke>", "</tool_call>", "<tool_call>", "```json\n{}\n```"),
    *("a ' \" \\n \\ %s {{ x }}", "don 't do n't . , !", "x" * 500),
]
VALUES = [
    *({"text": text} for text in TEXTS),
    *({"maybe": text} for text in TEXTS if text not in ("null", "None")),
    *({"either": text} for text in TEXTS if text != "5"),
    *({"count": 5}, {"count": -(10**25)}, {"ratio": 1.5}, {"ratio": 2}, {"ratio": -1e-07}),
    *({"flag": True}, {"flag": False}, {"nothing": None}, {"maybe": None}, {"either": 5}),
    *({"color": "red"}, {"color": "1"}, {"any": "red"}, {"any": " a\n"}, {"any": 5}, {"any": [1]}),
    *({"items": []}, {"table": {}}, {"items": [1, " a\n", [None, True, {"b": " c "}], 1.0]}),
    {"table": {"a": {"b": [" x ", False, None, '"', "</parameter>"]}}},
    *({"undeclared": " a\n"}, {"undeclared": 7}, {}),
    {"path": " /a b\n", "text": "\n  x\n", "count": 1, "flag": False, "items": ["\n"], "maybe": None},
]


@pytest.fixture(scope="module", params=sorted(BY_PARSER))
def by_template(request, root):
    folder = write_model(root / f"template-{request.param}", "{{ messages }}")
    marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    write_tokenizer(folder, (*control_tokens("default"), *marks))
    return ChatRenderer.load(folder, "default", {"tool_parser": request.param})


def exact(value):
    """Return a value as a text that tells true from 1, and 1 from 1.0."""
    return json.dumps(value, sort_keys=True)


def is_ambiguous(renderer, text):
    """Return whether a text holds what only its format may write, so that a reader cannot tell the two apart."""
    if any(mark in text for mark in QUOTES.get(renderer.name, ())):
        return True
    syntax = SYNTAX.get(renderer.name)
    if syntax is None:
        return False
    if syntax.unended is not None and syntax.unended.search(text):
        return True
    return any(isinstance(tag, Tag) and tag.proper_close.search(text + "x") for tag in (syntax.argument, syntax.call))


def read(renderer, prompt, output, tools=(TOOL,)):
    return [(call.name, exact(call.arguments), call.error) for call in renderer.parse(output, prompt, tools).tool_calls]


@pytest.mark.slow
def test_arguments_are_what_the_format_wrote(chat):
    wrong = {}
    for value in VALUES:
        arguments = {"path": "/x", **value}
        found = read(chat, *written(chat, arguments))
        if found != [("write", exact(arguments), None)]:
            wrong[exact(value)] = found
    assert not wrong


def test_calls_of_one_turn_keep_their_own_arguments(chat):
    calls = [{"text": " a\n", "path": "</invoke>"}, {}, {"path": "\n", "count": 1}]
    found = read(chat, *written(chat, *calls[: 1 if chat.name in SINGLE_CALL else None]))
    assert found == [("write", exact(one), None) for one in calls[: len(found)]]
    assert len(found) == (1 if chat.name in SINGLE_CALL else 3)


FRAGMENTS = st.sampled_from(
    [
        *(" ", "\n", "\r\n", "\t", "a", "é", "1", '"', "'", "\\", "{", "}", "<", ">", "</", "=", ":", ","),
        *("<parameter=text>", "</parameter>", "</function>", "<function=write>", "true", "null", "```"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<parameter name="text">'),
        *('<invoke name="write">', "</invoke>", "<tool_call>", "</tool_call>", "</think>"),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@given(texts=st.lists(st.lists(FRAGMENTS, max_size=8).map("".join), min_size=2, max_size=2))
def test_any_text_is_read_as_it_was_written(root, family, texts):
    renderer = shared(root / family, family)
    assume(not any(is_ambiguous(renderer, text) for text in texts))
    arguments = dict(zip(("text", "path"), texts, strict=True))
    assert read(renderer, *written(renderer, arguments)) == [("write", exact(arguments), None)]


@pytest.mark.slow  # it loads transformers
def test_formats_by_template_keep_texts_too(by_template):
    spell = BY_PARSER[by_template._backend.config.tool_parser]
    marks = ("</arg_value>", "</tool_call>", "<tool_call>")  # encoded as text, they are the control tokens
    for text in (text for text in TEXTS if text not in marks):
        output = by_template.encode(spell({"text": text, "path": "\n", "flag": "true"}))
        expected = {"text": text, "path": "\n", "flag": True}
        assert read(by_template, None, output) == [("write", exact(expected), None)]


@pytest.mark.parametrize("family", sorted(SYNTAX))
@pytest.mark.parametrize("value", [{"count": "five"}, {"flag": "yes"}, {"items": "[1"}, {"ratio": "Infinity"}])
def test_a_value_that_its_schema_cannot_hold_makes_a_call_malformed(root, family, value):
    renderer = shared(root / family, family)
    found = read(renderer, *written(renderer, {"path": " a", **value}))
    assert found == [("write", "null", "invalid_json")]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_was_cut_off_is_never_another_call(root, family):
    renderer = shared(root / family, family)
    arguments = {"path": " a\n", "text": "</parameter>\n<b>"}
    prompt, output = written(renderer, arguments)
    for length in range(len(output)):
        for call in renderer.parse(output[:length], prompt, [TOOL]).tool_calls:
            assert call.error is not None or exact(call.arguments) == exact(arguments)


def test_a_value_that_quotes_a_call_is_no_call(chat):
    turn = chat.decode(written(chat, {"path": "/x"})[1])
    arguments = {"text": f"For example: {turn} and so on."}
    found = read(chat, *written(chat, arguments))
    assert len(found) == 1
    assert is_ambiguous(chat, arguments["text"]) or found == [("write", exact(arguments), None)]


BEGUN = {
    "qwen3.5": ("<parameter=path>\n/x\n</parameter>\n", "<parameter=count>\n5\n"),
    "minimax-m2": ('<parameter name="path">/x</parameter>\n', '<parameter name="count">5\n'),
    "laguna-xs.2": ("<arg_key>path</arg_key>\n<arg_value>/x</arg_value>\n", "<arg_key>count</arg_key>\n"),
    "glm-4.5": ("<arg_key>path</arg_key>\n<arg_value>/x</arg_value>\n", "<arg_key>count</arg_key>\n5</arg_value>\n"),
    "hy3": (
        "<arg_key:opensource>path</arg_key:opensource>\n<arg_value:opensource>/x</arg_value:opensource>\n",
        "<arg_key:opensource>count</arg_key:opensource>\n5</arg_value:opensource>\n",
    ),
}
"""An argument as its format writes it, and one that is not ended."""


@pytest.mark.parametrize("family", sorted(BEGUN))
@pytest.mark.parametrize("first", [True, False])
def test_an_argument_that_was_begun_is_never_left_out(root, family, first):
    renderer = shared(root / family, family)
    prompt, output = written(renderer, {"path": "/x"})
    whole, begun = BEGUN[family]
    turn = renderer.decode(output)
    assert whole in turn
    broken = turn.replace(whole, begun + whole if first else whole + begun)
    [found] = read(renderer, prompt, renderer.encode(broken))
    assert found == ("write", "null", found[2])
    assert found[2] in ("malformed_structure", "invalid_json")


ENDS = {"qwen3.5": "</parameter>\n", "minimax-m2": "</parameter>\n", "laguna-xs.2": "</arg_value>\n"}


@pytest.mark.parametrize("family", sorted(ENDS))
def test_a_text_holds_no_argument_that_the_call_lacks(root, family):
    renderer = shared(root / family, family)
    prompt, output = written(renderer, {"path": "/x", "text": "a"})
    turn = renderer.decode(output)
    for end in ("", f"{ENDS[family]}and "):
        broken = turn.replace(ENDS[family], end, 1)
        assert read(renderer, prompt, renderer.encode(broken)) == [("write", "null", "malformed_structure")]
    quoted = {"path": broken[: broken.rindex(ENDS[family])], "text": "a"}
    assert read(renderer, *written(renderer, quoted)) == [("write", exact(quoted), None)]


ENDS_OF_CALLS = {
    "qwen3.5": ("</tool_call>", "</tool_call>\n<tool_call>\n", "</function>\n</tool_call>\n<tool_call>\n"),
    "laguna-xs.2": ("</tool_call>",),
    "glm-4.5": ("</tool_call>",),
    "hy3": ("</tool_call:opensource>",),
    "minimax-m2": ("</invoke>",),
}


@pytest.mark.parametrize(("family", "marks"), [(name, marks) for name, ends in ENDS_OF_CALLS.items() for marks in ends])
def test_a_call_that_begins_in_another_one_is_never_a_part_of_it(root, family, marks):
    """Its arguments would be added to those of the first call, or to the text of the last argument."""
    renderer = shared(root / family, family)
    prompt, output = written(renderer, {"path": "/x"}, {"text": "a"})
    turn = renderer.decode(output)
    assert marks in turn
    found = read(renderer, prompt, renderer.encode(turn.replace(marks, "", 1)))
    assert found == [("write", "null", "malformed_structure")]


def test_a_call_that_was_begun_after_others_is_never_left_out(root):
    renderer = shared(root / "minimax-m2", "minimax-m2")
    prompt, output = written(renderer, {"path": "/x"}, {"count": 5})
    before, _, after = renderer.decode(output).rpartition("</invoke>")
    found = read(renderer, prompt, renderer.encode(before + after))
    assert found == [("write", exact({"path": "/x"}), None), ("write", "null", "malformed_structure")]


@pytest.mark.parametrize("family", ["qwen3.5", "prime-qwen3", "nemotron-3"])
def test_words_of_python_are_values_only_where_the_schema_names_their_type(root, family):
    renderer = shared(root / family, family)
    prompt, output = written(renderer, {"flag": "True", "maybe": "None", "text": "True", "any": "None"})
    expected = {"flag": True, "maybe": None, "text": "True", "any": "None"}
    assert read(renderer, prompt, output) == [("write", exact(expected), None)]


@pytest.mark.parametrize("family", ["qwen3.5", "glm-4.5", "laguna-xs.2", "minimax-m2"])
@pytest.mark.parametrize(
    "tools", [(), ({"function": {"name": "write"}},), ({"name": "write", "parameters": PARAMETERS},)]
)
def test_a_tool_without_a_schema_receives_texts_and_json(root, family, tools):
    renderer = shared(root / family, family)
    arguments = {"text": " a\n", "count": 5}
    prompt, output = written(renderer, arguments)
    assert read(renderer, prompt, output, tools) == [("write", exact(arguments), None)]


@pytest.mark.parametrize("family", sorted(SYNTAX))
def test_the_library_still_needs_help(tmp_path, family):
    renderer = load(tmp_path, family)
    arguments = {"text": " a\n", "maybe": "5"}
    prompt, output = written(renderer, arguments)
    parsed = renderer._backend.parse_response(output, tools=[TOOL], prompt_ids=prompt)
    assert [call.arguments for call in parsed.tool_calls] != [arguments], f"{family} can leave the table"
    assert [call.arguments for call in renderer.parse(output, prompt, [TOOL]).tool_calls] == [arguments]


def parts_of(family, text):
    return list(SYNTAX[family].argument.read(text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n",
            {"a": "\n1\n", "b": "\n2\n"},
        ),
        ("<parameter=a>1</parameter><parameter=b>2</parameter>", {"a": "1", "b": "2"}),
        ("<parameter=a>echo '</parameter>'; ls</parameter>\n</function>", {"a": "echo '</parameter>'; ls"}),
        (
            "<parameter=a>cat <<E\n<parameter=b>\n</parameter>\n</function>\nE\n</parameter>\n</function>",
            {"a": "cat <<E\n<parameter=b>\n</parameter>\n</function>\nE\n"},
        ),
        ("<parameter=a>1</parameter> and more", {"a": "1"}),
        ("<parameter=a>1</parameter>\n</function> and more", {"a": "1"}),
        ("<parameter=a>1<parameter=b>2</parameter>", {"a": "1<parameter=b>2"}),
        ("<parameter=a>1</parameter><parameter=b>2", {"a": "1", "b": None}),
        ("<parameter=a>1</parameter>x <parameter name='b'>2", {"a": "1", "": None}),
        ("</parameter><parameter=a>", {"a": None}),
        ("", {}),
    ],
)
def test_a_close_counts_where_the_format_goes_on(text, found):
    assert dict(parts_of("qwen3.5", text)) == found


def test_white_space_of_a_value_is_kept():
    assert parts_of("laguna-xs.2", "<arg_key>a</arg_key>\n <arg_value>\n 1 </arg_value>\n") == [("a", "\n 1 ")]
    assert parts_of("minimax-m2", '<parameter name="a">\r\n</parameter>\n') == [("a", "\r\n")]


def test_parts_are_read_in_time_that_grows_with_the_text():
    text = "<parameter=a>x</parameter>junk" * 20_000
    assert len(parts_of("qwen3.6", text)) == 20_000


TAGGED = "deepseek-v4"
MARKERS = {"<call>": "begin", "\n</call>": "end", "</": "close", "é🙂": "other"}
TEXT = st.lists(st.sampled_from([*MARKERS, "<", "call>", "a", " ", "\n", "é", "🙂", "\ufffd"])).map("".join)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    return load(tmp_path_factory.mktemp("format") / TAGGED, TAGGED)


@given(parts=st.lists(TEXT | st.lists(st.integers(0, 400))), offset=st.integers(0, 3))
def test_they_are_where_the_library_finds_them(tagged, parts, offset):
    ids = [one for part in parts for one in (tagged.encode(part) if isinstance(part, str) else part)]
    tokenizer = tagged._tokenizer
    expected = list(text_lexemes_of_the_library(tokenizer, ids, offset, MARKERS))
    assert list(text_lexemes(tokenizer, ids, offset, MARKERS)) == expected


def test_a_turn_of_many_calls_is_read_in_time(tagged):
    prompt, turn = written(tagged, *[{"text": "a b c", "count": 1}] * 200)
    begun = time.process_time()
    assert len(tagged.parse(turn, prompt, (TOOL,)).tool_calls) == 200
    assert time.process_time() - begun < 5  # quadratic time is a minute


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
PYTHON = {"True": True, "False": False, "None": None}
SCHEMA = {
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
    assert types_of(schema, SCHEMA) == types


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
    lambda inner: st.lists(inner | st.text(max_size=4), max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(JSON)
def test_json_keeps_its_type(value):
    assert repr(read_value(json.dumps(value), None, {})) == repr(value)
