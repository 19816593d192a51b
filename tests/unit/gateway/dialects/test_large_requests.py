"""What a large request costs grows with its size, and no faster: in time, in values, and in what stands for them."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.base.errors import InvalidFieldError, TooLargeError
from rollout_service.gateway.capture.history import as_messages
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.dialects.fields import MAX_VALUES, parse_json
from tests.support.gateway import answers

pytestmark = pytest.mark.slow

MANY = 40_000
SECONDS = 20.0
"""What grows with the square of `MANY` takes longer, and what does not takes about one."""


def in_time(work: Callable[[], Any]) -> Any:
    """Do some work, which must not take long."""
    began = time.monotonic()
    result = work()
    assert time.monotonic() - began < SECONDS
    return result


@pytest.mark.parametrize("dialect", CODECS)
@pytest.mark.parametrize("item", [b"{}", b"[]", b"0", b'"a"', b'"\\""'])
def test_a_body_with_too_many_values_is_refused_before_it_is_read(dialect, item):
    content = b'{"metadata":[' + b",".join([item] * (MAX_VALUES + 2)) + b"]}"
    with pytest.raises(TooLargeError, match="values"):
        answers.read(dialect, content)
    told = CODECS[dialect].error(TooLargeError("x"))
    assert told.status == 413


def test_commas_and_brackets_of_texts_are_no_values():
    text = '{"a": [1, 2]}, "\\' * (MAX_VALUES // 2)
    assert parse_json(json.dumps([text, {}])) == [text, {}]


@pytest.mark.parametrize("content", ['"' + '\\"' * MAX_VALUES + ",", '{"a":"' + "\\" * MAX_VALUES + '","'])
def test_a_string_that_does_not_end_is_looked_at_once(content):
    with pytest.raises(ValueError, match=r"JSON|line"):
        in_time(lambda: parse_json(content * 3))


def test_halves_of_surrogate_pairs_are_mended_in_place():
    content = b'["\\\\ud800 \\ud83d\\ude00 \\ud83d \\ude00\\ud83d\\ude00"]'
    assert parse_json(content) == ["\\ud800 \U0001f600 \ufffd \ufffd\U0001f600"]
    assert parse_json(b'["' + b"\\udc00" * MANY + b'"]') == ["\ufffd" * MANY]


def test_many_calls_of_google_are_answered_in_time():
    calls = [{"functionCall": {"name": f"f{n}", "args": {}, "id": f"c{n}"}} for n in range(MANY)]
    results = [
        {"functionResponse": {"name": "other", "response": {"output": "x"}, "id": f"c{n}"}}
        for n in reversed(range(MANY))
    ]
    body = {"contents": [{"role": "model", "parts": calls}, {"parts": results}]}
    call = in_time(lambda: answers.read(Dialect.GOOGLE, body))
    assert [message.call_id for message in call.messages[1:]] == [f"c{n}" for n in reversed(range(MANY))]


def test_many_results_find_their_calls_in_time():
    calls = tuple(ClientToolCall(f"c{n}", "f", "{}") for n in range(MANY))
    results = [ClientMessage("tool", "x", call_id=f"other{n}") for n in range(MANY)]
    unnamed = [ClientMessage("tool", "x") for _ in range(MANY)]
    history = [ClientMessage("assistant", calls=calls), *results, *unnamed]
    rendered = in_time(lambda: as_messages(history, {}))
    assert [message.tool_call_id for message in rendered[1 + MANY :]] == [f"c{n}" for n in range(MANY)]


def test_references_stand_for_a_bounded_number_of_characters():
    tool = {"name": "f", "description": "x" * 100_000, "input_schema": {}, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "f"}

    def read(count: int) -> Any:
        content = [{"type": "tool_result", "tool_use_id": "a", "content": [reference] * count}]
        body = {"tools": [tool], "messages": [{"role": "user", "content": content}]}
        return answers.read(Dialect.ANTHROPIC, body)

    assert len(read(20).messages[0].text) > 2_000_000
    with pytest.raises(InvalidFieldError, match=r"messages\.0\.content\.0\.content\.\d+"):
        read(MANY)


def test_a_large_parameter_is_named_and_not_kept():
    body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {f"{n}": 1 for n in range(5_000)}}
    call = answers.read(Dialect.CHAT, body | {"temperature": 0.5})
    assert call.requested == {"temperature": 0.5}
    assert call.ignored == ("logit_bias",)
