"""Chat Completions: what is read from requests, and what clients are answered."""

import json
from dataclasses import replace

import pytest

from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import InvalidFieldError, MalformedBodyError
from rollout_service.gateway.contract import (
    AnswerEnd,
    ClientMessage,
    ClientToolCall,
    Dialect,
    ModelCall,
    TextDelta,
    TokenLogprob,
)
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.errors import (
    ContextOverflowError,
    RefusedParameterError,
    RolloutEndedError,
    UnsupportedContentError,
)
from tests.support.gateway import answers
from tests.support.gateway.answers import CALLS, KEY, REASONING, TEXT, sse_events

CHAT = Dialect.CHAT
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def body(**more: object) -> dict[str, object]:
    return {"model": "m", "messages": [HELLO], **more}


def read(**more: object) -> ModelCall:
    return answers.read(CHAT, body(**more))


def test_a_history_is_read_by_role_with_its_calls_and_results():
    history = [
        {"role": "system", "content": "be kind"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        HELLO,
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{ }"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "done"}]},
        {
            "role": "assistant",
            "reasoning": "so",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        },
        {"role": "assistant"},
    ]
    assert read(messages=history).messages == (
        ClientMessage("system", "be kind"),
        ClientMessage("developer", "a\n\nb"),
        ClientMessage("user", "hello"),
        ClientMessage("assistant", "", "hm", (ClientToolCall("c", "f", "{ }"),)),
        ClientMessage("tool", "done", call_id="c"),
        ClientMessage("assistant", "xy", "so"),
        ClientMessage("assistant"),
    )


def test_a_call_of_a_function_in_the_form_before_tool_calls_is_kept_with_its_result():
    made = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{ }"}}
    result = {"role": "function", "name": "f", "content": "done"}
    assert read(messages=[HELLO, made, result]).messages[1:] == (
        ClientMessage("assistant", calls=(ClientToolCall(None, "f", "{ }"),)),
        ClientMessage("tool", "done", tool_name="f"),
    )


def test_the_arguments_of_a_call_may_be_an_object():
    call = {"id": "", "function": {"name": "f", "arguments": {"a": [1.0, "é"]}}}
    [message] = read(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.calls == (ClientToolCall(None, "f", '{"a":[1.0,"é"]}'),)


def test_the_newer_limit_of_tokens_goes_before_the_older():
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        "none",
        "required",
        {"type": "function", "function": {"name": "bash"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
    ],
)
def test_a_choice_of_tools_forces_nothing_and_is_named(choice):
    assert read(tool_choice=choice).requested == {"tool_choice": choice}


@pytest.mark.parametrize(
    ("change", "error", "path"),
    [
        ({"messages": "hello"}, InvalidFieldError, "messages"),
        ({"messages": []}, InvalidFieldError, "messages"),
        ({"messages": [HELLO, 3]}, InvalidFieldError, "messages.1"),
        ({"messages": [{"role": "robot"}]}, InvalidFieldError, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            InvalidFieldError,
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}]},
            InvalidFieldError,
            "messages.0.tool_calls.0.function.name",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            UnsupportedContentError,
            "messages.0.content.0",
        ),
        ({"modalities": ["text", "audio"]}, UnsupportedContentError, "modalities"),
        ({"tools": [{"type": "function"}]}, InvalidFieldError, "tools.0.function"),
        ({"max_tokens": 0}, InvalidFieldError, "max_tokens"),
        ({"max_tokens": True}, InvalidFieldError, "max_tokens"),
        ({"stream": "yes"}, InvalidFieldError, "stream"),
        ({"stream_options": []}, InvalidFieldError, "stream_options"),
        ({"stop": [1]}, InvalidFieldError, "stop.0"),
        ({"tool_choice": 4}, InvalidFieldError, "tool_choice"),
        ({"n": 2, "stream": True}, RefusedParameterError, "n"),
        ({"tool_choice": "must"}, InvalidFieldError, "tool_choice"),
        ({"tool_choice": {"function": {}}}, InvalidFieldError, "tool_choice.type"),
        ({"logprobs": 3}, InvalidFieldError, "logprobs"),
        ({"logprobs": True, "top_logprobs": 2}, RefusedParameterError, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, InvalidFieldError, "response_format.type"),
    ],
)
def test_what_cannot_be_read_is_named(change, error, path):
    with pytest.raises(error) as caught:
        answers.read(CHAT, body(**change))
    assert [field.path for field in caught.value.fields] == [path]
    told = CODECS[CHAT].error(caught.value)
    assert told.status == 400
    assert json.loads(told.body)["error"]["param"] == path


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"a": 1e999}', b'{"a":' + b"[" * 5000, b'{"a":NaN}'])
def test_a_body_that_is_not_json(content):
    with pytest.raises(MalformedBodyError):
        answers.read(CHAT, content)


def test_a_body_that_is_no_object():
    with pytest.raises(InvalidFieldError, match="body: must be an object"):
        answers.read(CHAT, b"[]")


def test_half_a_surrogate_pair_is_replaced():
    escaped = rb'{"messages":[{"role":"user","content":"a\ud83d b\ude00 \ud83d\ude00 \\ud83d"}]}'
    [message] = answers.read(CHAT, escaped).messages
    assert message.text == "a\ufffd b\ufffd \U0001f600 \\ud83d"


def test_a_stream_carries_the_answer_in_the_order_of_its_events():
    request = read(stream=True, stream_options={"include_usage": True})
    *chunks, last = sse_events(answers.stream(request, answers.full_answer()))
    assert last == (None, "[DONE]")
    data = [chunk for _, chunk in chunks]
    assert {chunk["id"] for chunk in data} == {f"chatcmpl-{KEY}"}
    *deltas, end, usage = data
    assert deltas[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    merged = [delta["choices"][0]["delta"] for delta in deltas]
    assert "".join(delta.get("reasoning_content", "") for delta in merged) == REASONING
    assert "".join(delta.get("content", "") for delta in merged) == TEXT
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 60}


def test_usage_is_left_out_of_a_stream_unless_asked_for():
    events = sse_events(answers.stream(read(stream=True), answers.full_answer()))
    assert not [data for _, data in events if "usage" in data]


@pytest.mark.parametrize(("finish", "told"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
def test_the_reason_of_the_end(finish, told):
    events = answers.answer([TextDelta("hi")], finish=finish)
    answer = answers.whole(read(), events)
    assert answer["choices"][0]["finish_reason"] == told
    assert answer["choices"][0]["message"]["content"] == "hi"


def test_a_whole_answer_has_the_parts_of_the_stream():
    answer = answers.whole(read(), answers.full_answer())
    [choice] = answer["choices"]
    assert choice["message"]["content"] == TEXT
    assert choice["message"]["reasoning_content"] == REASONING
    told = [(call["id"], *call["function"].values()) for call in choice["message"]["tool_calls"]]
    assert told == list(CALLS)
    assert answer["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


def test_logprobs_are_those_of_all_tokens_and_end_a_stream():
    request = read(logprobs=True, stream=True)
    *told, end = answers.answer([TextDelta("hé")])
    assert isinstance(end, AnswerEnd)
    events = [*told, replace(end, logprobs=(TokenLogprob("hé", -0.5), TokenLogprob("\ufffd", -1.0)))]
    shown = {
        "content": [
            {"token": "hé", "logprob": -0.5, "bytes": [104, 195, 169], "top_logprobs": []},
            {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert answers.whole(request, events)["choices"][0]["logprobs"] == shown
    chunks = [data["choices"][0] for _, data in sse_events(answers.stream(request, events))[:-1]]
    assert [chunk.get("logprobs") for chunk in chunks] == [None] * (len(chunks) - 1) + [shown]
    assert answers.whole(read(), events)["choices"][0]["logprobs"] is None


def test_siblings_are_choices_of_one_answer():
    first, second = answers.answer([TextDelta("a")]), answers.answer([TextDelta("b")])
    answer = answers.whole(read(n=2), first, second)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (100, 40)


def test_a_custom_tool_is_offered_as_a_function_and_called_by_its_text():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
    declared = {"type": "custom", "custom": {"name": "patch", "description": "Apply.", "format": grammar}}
    request = read(tools=[declared], stream=True)
    function = request.tools[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert "start: X" in function["description"]
    events = answers.answer(answers.call(0, "c", "patch", '{"input": "*** Begin\\n"}'))
    [call] = answers.whole(request, events)["choices"][0]["message"]["tool_calls"]
    assert call == {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin\n"}}
    deltas = [data["choices"][0]["delta"] for _, data in sse_events(answers.stream(request, events))[:-1]]
    parts = [part["custom"].get("input") for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts == ["", "*** Begin\n"]
    again = read(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert again.messages[0].calls == (ClientToolCall("c", "patch", '{"input":"*** Begin\\n"}'),)


def test_a_keep_alive_and_an_error_in_a_stream():
    writer = CODECS[CHAT].open_stream(read(stream=True))
    assert sse_events(writer.keep_alive()) == []
    [(_, event)] = sse_events(writer.fail(ContextOverflowError(200, 100)))
    assert event["error"]["code"] == "context_length_exceeded"


def test_errors_have_the_form_that_clients_know():
    told = CODECS[CHAT].error(ContextOverflowError(200, 100))
    error = json.loads(told.body)["error"]
    assert (told.status, error["code"]) == (400, "context_length_exceeded")
    for known in ("maximum context length is 100 tokens", "Input tokens exceed the configured limit"):
        assert known in error["message"]
    assert CODECS[CHAT].error(RolloutEndedError("over")).status == 410


def test_a_defect_does_not_tell_its_details_to_the_client():
    told = CODECS[CHAT].error(OSError("/root/secret"))
    assert told.status == 500
    assert b"secret" not in told.body


def test_a_repeated_request_has_the_same_fingerprint():
    first = read(stream=True, max_tokens=100)
    assert read(stream=False, max_tokens=200).fingerprint == first.fingerprint
    assert read(stream=True, stop="x").fingerprint != first.fingerprint
    other = answers.read(CHAT, body(), {"x-session-id": "s"})
    assert other.fingerprint != read().fingerprint
