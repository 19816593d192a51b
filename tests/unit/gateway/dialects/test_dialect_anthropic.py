"""Messages: what is read from requests, and what clients are answered."""

import json

import pytest

from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import InvalidFieldError, UnauthorizedError
from rollout_service.gateway.contract import (
    AnswerBegin,
    ClientMessage,
    ClientToolCall,
    Dialect,
    ModelCall,
    ReasoningDelta,
    TextDelta,
)
from rollout_service.gateway.dialects import CODECS, ListedModel
from rollout_service.gateway.errors import ContextOverflowError, RefusedParameterError, UnsupportedContentError
from tests.support.gateway import answers
from tests.support.gateway.answers import CALLS, KEY, REASONING, TEXT, sse_events

HELLO = {"role": "user", "content": "hello"}
FETCH = {
    "name": "Fetch",
    "description": "Get a page.",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}


def read(headers: dict[str, str] | None = None, **more: object) -> ModelCall:
    return answers.read(Dialect.ANTHROPIC, {"model": "m", "messages": [HELLO], **more}, headers)


def test_a_history_is_read_block_by_block():
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "later"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": KEY},
                {"type": "text", "text": "x"},
                {"type": "text", "text": "y"},
                {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"b": 1.0, "a": "é"}},
                {"type": "tool_use", "id": "c2", "name": "Bash", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "yes"}]},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    calls = (ClientToolCall("c1", "Bash", '{"b":1.0,"a":"é"}'), ClientToolCall("c2", "Bash", "{}"))
    assert read(messages=history).messages == (
        ClientMessage("user", "a\n\nb"),
        ClientMessage("system", "later"),
        ClientMessage("assistant", "xy", "hm", calls, turn_key=KEY),
        ClientMessage("tool", "no", call_id="c2", is_error=True),
        ClientMessage("tool", "yes", call_id="c1"),
        ClientMessage("user", "go on"),
    )


def test_the_block_about_billing_is_left_out_of_the_system_message():
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two"},
    ]
    assert read(system=system).messages[0] == ClientMessage("system", "one\n\ntwo")
    assert read(system=system[:1]).messages == (ClientMessage("user", "hello"),)


def test_a_deferred_tool_is_out_of_the_head_and_shown_where_it_is_referred_to():
    reference = {"type": "tool_reference", "tool_name": "Fetch"}
    history = [
        HELLO,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [reference]}]},
    ]
    call = read(messages=history, tools=[FETCH, {"name": "Bash", "input_schema": {"type": "object"}}])
    assert [tool["function"]["name"] for tool in call.tools] == ["Bash"]
    assert [tool["function"]["name"] for tool in call.deferred_tools] == ["Fetch"]
    assert '"description":"Get a page."' in call.messages[1].text


def test_a_search_result_is_told_with_its_title_and_source():
    found = {"type": "search_result", "title": "A", "source": "http://a", "content": [{"type": "text", "text": "b"}]}
    message = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [found]}]}
    assert [each.text for each in read(messages=[message]).messages] == ["A\nhttp://a\nb"]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "a\n\nb"},
        {"type": "content", "content": "a\n\nb"},
        {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
)
def test_a_document_of_text_is_told_with_its_title_and_context(source):
    document = {"type": "document", "source": source}
    texts = [document, document | {"title": "T", "context": "from c"}]
    assert read(messages=[{"role": "user", "content": texts}]).messages[0].text == "a\n\nb\n\nT\nfrom c\na\n\nb"


def test_tools_of_the_server_are_left_out_and_named():
    call = read(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert call.tools == ()
    assert call.ignored == ("tools[type=web_search_20250305]",)


@pytest.mark.parametrize(
    ("change", "error", "path"),
    [
        ({"messages": None}, InvalidFieldError, "messages"),
        ({"messages": [{"role": "tool"}]}, InvalidFieldError, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            InvalidFieldError,
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            UnsupportedContentError,
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            UnsupportedContentError,
            "messages.0.content.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            InvalidFieldError,
            "messages.0.content.0",
        ),
        ({"tools": [{"name": "a"}]}, InvalidFieldError, "tools.0.input_schema"),
        ({"tool_choice": "auto"}, InvalidFieldError, "tool_choice"),
        ({"tool_choice": {"type": "must"}}, InvalidFieldError, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, InvalidFieldError, "tool_choice.name"),
        ({"system": 4}, InvalidFieldError, "system"),
        ({"max_tokens": 0}, InvalidFieldError, "max_tokens"),
    ],
)
def test_what_cannot_be_read_is_named(change, error, path):
    with pytest.raises(error) as caught:
        read(**change)
    assert [field.path for field in caught.value.fields] == [path]
    told = CODECS[Dialect.ANTHROPIC].error(caught.value)
    assert told.status == 400
    assert json.loads(told.body)["error"]["type"] == "invalid_request_error"
    assert path in json.loads(told.body)["error"]["message"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_so_that_the_client_sends_the_whole_history(thread):
    with pytest.raises(RefusedParameterError) as caught:
        read(thread=thread)
    told = json.loads(CODECS[Dialect.ANTHROPIC].error(caught.value).body)
    assert told["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_a_stream_opens_and_closes_one_block_after_the_other():
    events = sse_events(answers.stream(read(stream=True), answers.full_answer()))
    assert all(name == data["type"] for name, data in events)
    names = [data["type"] for _, data in events if data["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", *block * 4, "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert start["id"] == f"msg_{KEY}"
    assert start["usage"]["input_tokens"] == 100
    deltas = [(data["index"], data["delta"]) for _, data in events if data["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for _, delta in deltas) == REASONING
    assert "".join(delta.get("text", "") for _, delta in deltas) == TEXT
    assert [delta for _, delta in deltas if "signature" in delta] == [{"type": "signature_delta", "signature": KEY}]
    for index, (_, _, arguments) in enumerate(CALLS, start=2):
        assert "".join(delta["partial_json"] for at, delta in deltas if at == index) == arguments
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"] == {
        "input_tokens": 40,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 60,
        "output_tokens": 20,
    }


def test_a_whole_answer_has_the_blocks_of_the_stream():
    message = answers.whole(read(), answers.full_answer())
    assert message["content"] == [
        {"type": "thinking", "thinking": REASONING, "signature": KEY},
        {"type": "text", "text": TEXT},
        {"type": "tool_use", "id": "call_0", "name": "bash", "input": {"command": "naïve"}},
        {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "a"}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_a_malformed_call_in_a_whole_answer_is_text():
    events = answers.answer(answers.call(0, "c", "bash", '{"a', error="not JSON"))
    message = answers.whole(read(), events)
    assert message["content"] == [{"type": "text", "text": 'bash({"a)'}]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("finish", "stopped_by", "told"),
    [
        (FinishReason.STOP, None, {"stop_reason": "end_turn", "stop_sequence": None}),
        (FinishReason.STOP, "END", {"stop_reason": "stop_sequence", "stop_sequence": "END"}),
        (FinishReason.LENGTH, None, {"stop_reason": "max_tokens", "stop_sequence": None}),
    ],
)
def test_the_reason_of_the_end(finish, stopped_by, told):
    events = answers.answer([TextDelta("hi")], finish=finish, stopped_by=stopped_by)
    assert told.items() <= answers.whole(read(), events).items()
    assert sse_events(answers.stream(read(), events))[-2][1]["delta"] == told


def test_keep_alives_are_empty_deltas_of_an_open_block():
    writer = CODECS[Dialect.ANTHROPIC].open_stream(read(stream=True))
    assert sse_events(writer.keep_alive()) == []
    sent = writer.write(AnswerBegin(KEY, 1)) + writer.keep_alive() + writer.keep_alive()
    for event in (
        *[ReasoningDelta("a")],
        None,
        TextDelta("b"),
        None,
        *answers.call(0, "c", "f", "{}")[:2],
        None,
    ):
        sent += writer.write(event) if event else writer.keep_alive()
    for event in (answers.call(0, "c", "f", "")[-1], answers.answer()[-1]):
        sent += writer.write(event)
    events = [data for _, data in sse_events(sent)]
    starts = [data["content_block"]["type"] for data in events if data["type"] == "content_block_start"]
    assert starts == ["text", "thinking", "text", "tool_use"]
    empty = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    deltas = [data["delta"] for data in events if data["type"] == "content_block_delta"]
    held = [delta["type"] for delta in deltas if delta.get(empty.get(delta["type"], ""), "x") == ""]
    assert held == ["text_delta", "text_delta", "thinking_delta", "text_delta", "input_json_delta"]


def test_errors_have_the_form_that_clients_know():
    codec = CODECS[Dialect.ANTHROPIC]
    told = codec.error(ContextOverflowError(200, 100))
    assert json.loads(told.body) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 200 tokens > 100 maximum"},
    }
    assert json.loads(codec.error(UnauthorizedError("no")).body)["error"]["type"] == "authentication_error"
    [(name, event)] = sse_events(codec.open_stream(read()).fail(ValueError()))
    assert (name, event["type"], event["error"]["type"]) == ("error", "error", "api_error")


def test_a_list_of_models():
    listed = json.loads(CODECS[Dialect.ANTHROPIC].models([ListedModel("m", 4096)]))
    assert (listed["first_id"], listed["has_more"]) == ("m", False)
    assert listed["data"][0]["type"] == "model"


def test_lanes_of_claude_code():
    headers = {"user-agent": "claude-cli/2.1 (external)", "x-claude-code-session-id": "s"}
    lane = read(headers).lane
    assert (lane.client, lane.session, lane.agent, lane.purpose) == ("claude_code", "s", "", "")
    lane = read({**headers, "x-claude-code-agent-id": "a"}).lane
    assert (lane.session, lane.agent, lane.purpose) == ("s", "a", "subagent")
    assert read(metadata={"user_id": json.dumps({"session_id": "s"})}).lane.session == "s"
