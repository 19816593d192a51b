"""The tables of parameters say what becomes of each, and the page of reference says the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docs_site.parameters import replace_tables
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import InvalidFieldError, MalformedBodyError
from rollout_service.gateway.contract import Dialect, ModelCall, ReasoningDelta, TextDelta
from rollout_service.gateway.dialects import CODECS, WholeAnswer
from rollout_service.gateway.dialects.fields import Treatment
from rollout_service.gateway.errors import RefusedParameterError
from tests.support.gateway import answers
from tests.support.gateway.recordings import NAMES, load, places

ROOT = Path(__file__).parents[4]
ROWS = [(dialect, row) for dialect, codec in CODECS.items() for row in codec.parameters.rows]
SCHEMA = {"type": "array"}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Dialect.RESPONSES: {"input": "hi"},
    Dialect.ANTHROPIC: {"messages": [{"role": "user", "content": "hi"}]},
    Dialect.GOOGLE: {"contents": [{"parts": [{"text": "hi"}]}]},
}
HONORED: dict[Dialect, dict[str, tuple[Any, Any]]] = {
    Dialect.CHAT: {
        "model": ("m", lambda call: call.model == "m"),
        "messages": ([{"role": "user", "content": "x"}], lambda call: call.messages[0].text == "x"),
        "tools": ([{"function": {"name": "f"}}], lambda call: call.tools[0]["function"]["name"] == "f"),
        "max_tokens": (7, lambda call: call.max_tokens == 7),
        "max_completion_tokens": (7, lambda call: call.max_tokens == 7),
        "stream": (True, lambda call: call.stream),
        "stream_options.include_usage": (True, lambda call: call.include_usage),
        "response_format": (
            {"type": "json_schema", "json_schema": JSON_SCHEMA},
            lambda call: call.json_schema == SCHEMA,
        ),
        "stop": (["x"], lambda call: call.stop == ("x",)),
        "n": (3, lambda call: call.n == 3),
        "logprobs": (True, lambda call: call.logprobs),
        "modalities": (["text"], lambda call: call.messages),
    },
    Dialect.RESPONSES: {
        "model": ("m", lambda call: call.model == "m"),
        "input": ("x", lambda call: call.messages[0].text == "x"),
        "instructions": ("x", lambda call: call.messages[0].role == "system"),
        "tools": ([{"type": "function", "name": "f"}], lambda call: call.tools[0]["function"]["name"] == "f"),
        "max_output_tokens": (7, lambda call: call.max_tokens == 7),
        "stream": (True, lambda call: call.stream),
        "text.format": (JSON_SCHEMA, lambda call: call.json_schema == SCHEMA),
    },
    Dialect.ANTHROPIC: {
        "model": ("m", lambda call: call.model == "m"),
        "messages": ([{"role": "user", "content": "x"}], lambda call: call.messages[0].text == "x"),
        "system": ("x", lambda call: call.messages[0].role == "system"),
        "tools": ([{"name": "f", "input_schema": {}}], lambda call: call.tools[0]["function"]["name"] == "f"),
        "max_tokens": (7, lambda call: call.max_tokens == 7),
        "stream": (True, lambda call: call.stream),
        "stop_sequences": (["x"], lambda call: call.stop == ("x",)),
        "output_config.format": (JSON_SCHEMA, lambda call: call.json_schema == SCHEMA),
        "output_format": (JSON_SCHEMA, lambda call: call.json_schema == SCHEMA),
    },
    Dialect.GOOGLE: {
        "contents": ([{"parts": [{"text": "x"}]}], lambda call: call.messages[0].text == "x"),
        "systemInstruction": ({"parts": [{"text": "x"}]}, lambda call: call.messages[0].role == "system"),
        "tools": (
            [{"functionDeclarations": [{"name": "f"}]}],
            lambda call: call.tools[0]["function"]["name"] == "f",
        ),
        "generationConfig.maxOutputTokens": (7, lambda call: call.max_tokens == 7),
        "generationConfig.stopSequences": (["x"], lambda call: call.stop == ("x",)),
        "generationConfig.candidateCount": (3, lambda call: call.n == 3),
        "generationConfig.responseMimeType": (
            "application/json",
            lambda call: call.json_schema == {"type": "object"},
        ),
        "generationConfig.responseSchema": ({"type": "ARRAY"}, lambda call: call.json_schema == SCHEMA),
        "generationConfig.responseJsonSchema": (SCHEMA, lambda call: call.json_schema == SCHEMA),
        "generationConfig.responseModalities": (["TEXT"], lambda call: call.messages),
    },
}
"""For each honored parameter a value, and whether a call shows it."""
CHOICES: dict[str, Any] = {
    "tool_choice": "required",
    "tool_choice.type": "any",
    "tool_choice.name": "f",
    "toolConfig.functionCallingConfig": {"mode": "ANY"},
}
"""Choices of tools, which have forms of their own."""


def read(dialect: Dialect, path: str, value: Any) -> ModelCall:
    """Read a request that sets one parameter."""
    *groups, name = path.split(".")
    more: dict[str, Any] = {name: value}
    if groups == ["tool_choice"] and path != "tool_choice.type":
        more["type"] = "auto"
    for group in reversed(groups):
        more = {group: more}
    return answers.read(dialect, BODIES[dialect] | more)


def of(treatment: Treatment) -> list[Any]:
    rows = [(dialect, row) for dialect, row in ROWS if row.treatment is treatment]
    return [pytest.param(dialect, row, id=f"{dialect}-{row.path}") for dialect, row in rows]


@pytest.mark.parametrize(("dialect", "row"), of(Treatment.HONORED))
def test_what_is_honored_is_in_the_call(dialect, row):
    value, shows = HONORED[dialect][row.path]
    call = read(dialect, row.path, value)
    assert shows(call)
    assert not call.ignored
    assert not call.requested


@pytest.mark.parametrize(("dialect", "row"), of(Treatment.RECORDED))
def test_what_is_recorded_is_in_the_request_and_nowhere_else(dialect, row):
    value = CHOICES.get(row.path, 0.5)
    call = read(dialect, row.path, value)
    kept = dict(call.requested)
    assert kept.pop(row.recorded_as or row.path) == value
    assert not set(kept) - {"tool_choice.type"}
    assert not call.ignored


@pytest.mark.parametrize(("dialect", "row"), of(Treatment.IGNORED))
def test_what_is_ignored_is_named(dialect, row):
    lists_and_texts = {"include": ["x"], "prompt_cache_key": "x"}
    objects = {"metadata": {"user_id": "x"}, "stream_options": {"x": 1}}
    call = read(dialect, row.path, {**lists_and_texts, **objects}.get(row.path, True))
    assert call.ignored == (row.path,)
    assert not set(call.requested) - {"tool_choice.type"}


@pytest.mark.parametrize(("dialect", "row"), of(Treatment.REFUSED))
@pytest.mark.parametrize("nothing", [None, False, 0, "", [], {}])
def test_what_is_refused_may_ask_for_nothing(dialect, row, nothing):
    with pytest.raises(RefusedParameterError) as caught:
        read(dialect, row.path, {"x": 1})
    assert caught.value.fields[0].path == row.path
    assert not read(dialect, row.path, nothing).ignored


@pytest.mark.parametrize("dialect", CODECS)
def test_what_no_table_knows_is_ignored_and_named(dialect):
    assert read(dialect, "unheard_of", 1).ignored in (("unheard_of",), ("unheardOf",))
    many = answers.read(dialect, BODIES[dialect] | {f"u{number:05}" + "x" * 200: 1 for number in range(5000)})
    assert len(many.ignored) <= 64
    assert max(map(len, many.ignored)) <= 80


@pytest.mark.parametrize("dialect", CODECS)
def test_a_group_of_parameters_must_be_an_object(dialect):
    for group in CODECS[dialect].parameters.groups:
        if "." not in group:
            with pytest.raises(InvalidFieldError, match=group):
                read(dialect, group, [1])


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "reference" / "gateway.md").read_text()
    assert page == replace_tables(page), "run `PYTHONPATH=packaging python -m docs_site.parameters` on the page"


def test_a_page_without_a_place_for_the_tables_is_refused():
    with pytest.raises(ValueError, match="no lines"):
        replace_tables("# Gateway\n")


NAMES_OF_FIELDS = re.findall(
    r"\S+",
    """
    role content text type name id arguments function tool_calls messages input contents parts tools system model
    tool_use_id tool_result tool_use thinking signature functionCall functionResponse response args call_id output
    custom format grammar stream n stop tool_choice max_tokens response_format json_schema schema namespace items
    reasoning summary encrypted_content action command generationConfig toolConfig thoughtSignature source data user
    assistant tool developer function_call custom_tool_call local_shell_call tool_search_output
    """,
)
WORDS = st.sampled_from(NAMES_OF_FIELDS) | st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)
DIALECTS = st.sampled_from(list(CODECS))


def read_or_refuse(dialect: Dialect, content: bytes) -> ModelCall | None:
    try:
        return CODECS[dialect].read(content, {}, "/v1beta/models/m:generateContent")
    except (InvalidFieldError, MalformedBodyError) as error:
        told = CODECS[dialect].error(error)
        assert told.status == 400
        json.loads(told.body)
        return None


@given(DIALECTS, VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_anything_is_read_or_refused(dialect, content):
    read_or_refuse(dialect, content)


RECORDED = [run for name in NAMES for run in load(name)[-1:]]
ANY_BODIES = [(run.dialect, json.dumps(run.body), places(run.body)[1:]) for run in RECORDED]


@given(st.data())
def test_a_real_request_with_one_value_changed_is_read_or_refused(data):
    dialect, body, places = data.draw(st.sampled_from(ANY_BODIES))
    path = data.draw(st.sampled_from(places))
    changed = json.loads(body)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(VALUES)
    read_or_refuse(dialect, json.dumps(changed).encode())


@pytest.mark.slow
@pytest.mark.parametrize("dialect", CODECS)
def test_deep_and_long_bodies_are_refused_or_read_without_recursion(dialect):
    for content in (
        b"[" * 100_000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b'{"a":"' + b"\\ud800" * 100_000 + b'"}',
    ):
        assert read_or_refuse(dialect, content) is None


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
PARTS = st.lists(TEXT.map(ReasoningDelta) | TEXT.map(TextDelta), max_size=4)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = TEXT | NUMBERS | st.booleans() | st.none()
ARGUMENTS = st.dictionaries(TEXT, SCALARS | st.lists(SCALARS, max_size=2), max_size=3)


@given(DIALECTS, PARTS, st.lists(ARGUMENTS, max_size=3))
def test_the_echo_of_an_answer_is_the_answer(dialect, parts, arguments):
    calls = [
        event
        for index, values in enumerate(arguments)
        for event in answers.call(index, f"call_{index}", f"f{index}", json.dumps(values, indent=1))
    ]
    events = answers.answer(parts, calls)
    request = answers.read(dialect, {"messages": [USER], "input": "hi", "contents": [{"parts": [{"text": "hi"}]}]})
    echoed = answers.read(dialect, echo(dialect, answers.whole(request, events))).messages[1:]
    whole = WholeAnswer.of(events)
    if not whole.parts:
        return
    [message] = echoed
    assert (message.text, message.reasoning or "") == (whole.text, whole.reasoning)
    assert [(call.id, call.name) for call in message.calls] == [(call.call_id, call.name) for call in whole.calls]
    made = [json.dumps(json.loads(call.arguments)) for call in message.calls]
    assert made == [json.dumps(values) for values in arguments]


USER = {"role": "user", "content": "hi"}


def echo(dialect: Dialect, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the request of an agent that sends an answer back as it came."""
    match dialect:
        case Dialect.CHAT:
            return {"messages": [USER, answer["choices"][0]["message"]]}
        case Dialect.RESPONSES:
            return {"input": [USER, *answer["output"]]}
        case Dialect.ANTHROPIC:
            return {"messages": [USER, {"role": "assistant", "content": answer["content"]}]}
        case Dialect.GOOGLE:
            return {"contents": [{"parts": [{"text": "hi"}]}, answer["candidates"][0]["content"]]}
