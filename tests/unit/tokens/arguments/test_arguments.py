"""What a tool receives is what was sampled, in every chat format: white space, line ends and types included."""

import json
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout_service.tokens import ChatRenderer
from rollout_service.tokens.arguments import SYNTAX, Tag
from tests.support.tokens.calls import BY_PARSER, PARAMETERS, TOOL, written
from tests.support.tokens.chat_formats import FAMILIES, control_tokens, load, write_model, write_tokenizer

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

shared = cache(load)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(params=FAMILIES)
def chat(request, root):
    return shared(root / request.param, request.param)


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
    tags = () if syntax is None else (syntax.argument, syntax.call)
    return any(isinstance(tag, Tag) and tag.proper_close.search(text + "x") for tag in tags)


def read(renderer, prompt, output, tools=(TOOL,)):
    return [
        (call.name, exact(call.arguments), call.error)
        for call in renderer.parse(output, prompt, tools).tool_calls
    ]


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
@pytest.mark.parametrize(
    "value", [{"count": "five"}, {"flag": "yes"}, {"items": "[1"}, {"ratio": "Infinity"}]
)
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
