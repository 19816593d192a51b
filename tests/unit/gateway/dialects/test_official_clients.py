"""The official clients of each API are served, and large requests take linear time."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import InvalidFieldError, TooLargeError
from rollout_service.gateway.capture.history import as_messages
from rollout_service.gateway.contract import (
    AnswerEvent,
    ClientMessage,
    ClientToolCall,
    Dialect,
    ModelCall,
    ReasoningDelta,
    TextDelta,
)
from rollout_service.gateway.dialects import CODECS, WholeAnswer
from rollout_service.gateway.dialects.answers import CallPart
from rollout_service.gateway.dialects.fields import MAX_VALUES, parse_json
from rollout_service.gateway.errors import ContextOverflowError
from tests.support.gateway import answers

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "hello"}]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers(-9, 9) | st.lists(TEXT, max_size=2), max_size=2)


@st.composite
def whole_answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Draw an answer: thoughts and texts in any order, cut anywhere, then calls."""
    deltas = st.one_of(TEXT.map(ReasoningDelta), TEXT.map(TextDelta))
    parts = draw(st.lists(deltas, max_size=6))
    calls = draw(st.lists(ARGUMENTS, max_size=3))
    finish = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    made = [
        event
        for index, arguments in enumerate(calls)
        for event in answers.call(index, f"call_{index}", f"tool_{index}", json.dumps(arguments))
    ]
    return answers.answer(parts, made, finish=finish)


class Server:
    """Answers every request of the clients with one body."""

    def __init__(self) -> None:
        self.answer = (200, b"")
        client = httpx2.Client(transport=httpx2.MockTransport(self._respond))
        self.openai = openai.OpenAI(api_key="k", http_client=client, max_retries=0)
        self.anthropic = anthropic.Anthropic(api_key="k", http_client=client, max_retries=0)

    def _respond(self, _: httpx2.Request) -> httpx2.Response:
        status, content = self.answer
        is_json = content.startswith(b"{")
        headers = {"content-type": "application/json" if is_json else "text/event-stream"}
        return httpx2.Response(status, headers=headers, content=content)


@pytest.fixture(scope="module")
def server() -> Server:
    """A server in this process, for all examples of a test: clients are slow to make."""
    return Server()


def request(dialect: Dialect) -> ModelCall:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    return answers.read(dialect, body | ({"input": "hi"} if dialect is Dialect.RESPONSES else {"messages": MESSAGES}))


def expected(events: Sequence[AnswerEvent]) -> tuple[str, str, list[tuple[str, str, str]]]:
    whole = WholeAnswer.of(events)
    return whole.reasoning, whole.text, [(call.call_id, call.name, call.arguments) for call in whole.calls]


@given(events=whole_answers())
def test_openai_reads_streams_of_chat_completions(server, events):
    server.answer = (200, answers.stream(request(Dialect.CHAT), events))
    with server.openai.chat.completions.stream(model="m", messages=MESSAGES) as opened:
        parts = [event.chunk for event in opened if event.type == "chunk"]
    choices = [chunk.choices[0] for chunk in parts if chunk.choices]
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    text = "".join(choice.delta.content or "" for choice in choices)
    calls: list[list[str]] = []
    for choice in choices:
        for call in choice.delta.tool_calls or ():
            if call.id:
                calls.append([call.id, call.function.name or "", ""])
            calls[call.index][2] += call.function.arguments or ""
    assert (reasoning, text, [tuple(call) for call in calls]) == expected(events)
    assert parts[-1].usage.completion_tokens == answers.USAGE.sampled_tokens


@given(events=whole_answers())
def test_openai_reads_whole_chat_completions(server, events):
    server.answer = (200, CODECS[Dialect.CHAT].whole(request(Dialect.CHAT), [WholeAnswer.of(events)]))
    message = server.openai.chat.completions.create(model="m", messages=MESSAGES).choices[0].message
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", "")
    assert (reasoning, message.content or "", calls) == expected(events)


@given(events=whole_answers())
def test_openai_reads_streams_of_responses(server, events):
    server.answer = (200, answers.stream(request(Dialect.RESPONSES), events))
    deltas: dict[str, str] = {}
    for event in server.openai.responses.create(model="m", input="hi", stream=True):
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    reasoning, text, calls = "", "", []
    for item in final.output:
        if item.type == "reasoning":
            reasoning += item.summary[0].text
            assert deltas[item.id] == item.summary[0].text
        elif item.type == "message":
            text += item.content[0].text
            assert deltas[item.id] == item.content[0].text
        else:
            calls.append((item.call_id, item.name, item.arguments))
            assert deltas[item.id] == item.arguments
    assert (reasoning, text, calls) == expected(events)
    assert final.usage.total_tokens == 120


@given(events=whole_answers())
def test_anthropic_reads_streams_of_messages(server, events):
    server.answer = (200, answers.stream(request(Dialect.ANTHROPIC), events))
    with server.anthropic.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as opened:
        message = opened.get_final_message()
    whole = WholeAnswer.of(events)
    assert [block.type for block in message.content] == [
        "tool_use" if isinstance(part, CallPart) else "thinking" if part.is_reasoning else "text"
        for part in whole.parts
    ]
    for block, part in zip(message.content, whole.parts, strict=True):
        if isinstance(part, CallPart):
            assert (block.id, block.name, block.input) == (
                part.call_id,
                part.name,
                json.loads(part.arguments),
            )
        elif part.is_reasoning:
            assert (block.thinking, block.signature) == (part.text, answers.KEY)
        else:
            assert block.text == part.text
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == 100


@given(events=whole_answers())
def test_anthropic_reads_whole_messages(server, events):
    content = CODECS[Dialect.ANTHROPIC].whole(request(Dialect.ANTHROPIC), [WholeAnswer.of(events)])
    server.answer = (200, content)
    message = server.anthropic.messages.create(model="m", max_tokens=9, messages=MESSAGES)
    assert len(message.content) == len(WholeAnswer.of(events).parts)


def test_a_full_context_is_an_error_that_each_library_raises(server):
    def overflow(dialect: Dialect) -> tuple[int, bytes]:
        told = CODECS[dialect].error(ContextOverflowError(200, 100))
        return told.status, told.body

    server.answer = overflow(Dialect.CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.code == "context_length_exceeded"
    server.answer = overflow(Dialect.ANTHROPIC)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 200 tokens > 100 maximum"):
        server.anthropic.messages.create(model="m", max_tokens=9, messages=MESSAGES)


MANY = 20_000
SECONDS = 20.0
"""Of the processor: work that grows with the square of `MANY` takes longer; linear work takes about one second."""


def in_time(work: Callable[[], Any]) -> Any:
    """Do some work, which must not take long."""
    began = time.process_time()
    result = work()
    assert time.process_time() - began < SECONDS
    return result


@pytest.mark.parametrize(
    ("dialect", "item"), [*zip(CODECS, [b"{}", b"[]", b"0", b'"a"'], strict=True), (Dialect.CHAT, b'"\\""')]
)
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
    assert read(20).size > 2_000_000, "so that it is rendered in a thread"
    with pytest.raises(InvalidFieldError, match=r"messages\.0\.content\.0\.content\.\d+"):
        read(MANY)


def test_a_large_parameter_is_named_and_not_kept():
    body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {f"{n}": 1 for n in range(5_000)}}
    call = answers.read(Dialect.CHAT, body | {"temperature": 0.5})
    assert call.requested == {"temperature": 0.5}
    assert call.ignored == ("logit_bias",)
