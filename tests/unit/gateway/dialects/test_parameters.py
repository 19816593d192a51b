"""The tables of parameters say what becomes of each, and the page of reference says the same."""

from pathlib import Path
from typing import Any

import pytest

from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.dialects.parameters import Treatment
from rollout_service.gateway.dialects.reference import replace_tables
from rollout_service.gateway.errors import RefusedParameterError
from tests.support.gateway import answers

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
    assert page == replace_tables(page), (
        "run `python -m rollout_service.gateway.dialects.reference` on the page"
    )


def test_a_page_without_a_place_for_the_tables_is_refused():
    with pytest.raises(ValueError, match="no lines"):
        replace_tables("# Gateway\n")
