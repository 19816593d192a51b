"""Whatever a body holds, it is read or refused by name; whatever an answer holds, its echo is read as it was."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import InvalidFieldError, MalformedBodyError
from rollout_service.gateway.contract import Dialect, ModelCall, ReasoningDelta, TextDelta
from rollout_service.gateway.dialects import CODECS, WholeAnswer
from tests.support.gateway import answers
from tests.support.gateway.recordings import NAMES, load, places

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


@given(DIALECTS, VALUES)
def test_any_value_is_read_or_refused(dialect, value):
    read_or_refuse(dialect, json.dumps(value).encode())


@given(DIALECTS, st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(dialect, content):
    read_or_refuse(dialect, content)


RECORDED = [run for name in NAMES for run in load(name)[-1:]]
BODIES = [(run.dialect, json.dumps(run.body), places(run.body)[1:]) for run in RECORDED]


@given(st.data())
def test_a_real_request_with_one_value_changed_is_read_or_refused(data):
    dialect, body, places = data.draw(st.sampled_from(BODIES))
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
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers(-(2**53), 2**53) | st.booleans() | st.none(), max_size=3)


@given(DIALECTS, PARTS, st.lists(ARGUMENTS, max_size=3))
def test_the_echo_of_an_answer_is_the_answer(dialect, parts, arguments):
    calls = [
        event
        for index, values in enumerate(arguments)
        for event in answers.call(index, f"call_{index}", f"f{index}", json.dumps(values, indent=1))
    ]
    events = answers.answer(parts, calls)
    request = answers.read(
        dialect, {"messages": [USER], "input": "hi", "contents": [{"parts": [{"text": "hi"}]}]}
    )
    echoed = answers.read(dialect, echo(dialect, answers.whole(request, events))).messages[1:]
    whole = WholeAnswer.of(events)
    if not whole.parts:
        return
    [message] = echoed
    assert (message.text, message.reasoning or "") == (whole.text, whole.reasoning)
    assert [(call.id, call.name) for call in message.calls] == [
        (call.call_id, call.name) for call in whole.calls
    ]
    assert [json.loads(call.arguments) for call in message.calls] == arguments


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
