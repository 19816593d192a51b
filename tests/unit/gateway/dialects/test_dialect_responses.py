"""Responses: what is read from requests, and what clients are answered."""

import json
from typing import Any

import pytest

from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEvent,
    ClientMessage,
    ClientToolCall,
    Dialect,
    ModelCall,
    TextDelta,
)
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.errors import (
    ContextOverflowError,
    RefusedParameterError,
    UnsupportedContentError,
)
from tests.support.gateway import answers
from tests.support.gateway.answers import CALLS, KEY, REASONING, TEXT, sse_events

HELLO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
SHELL = {"type": "function", "name": "bash", "strict": False, "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Apply.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "tools": [{"type": "function", "name": "spawn", "parameters": {}}],
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}


def read(headers: dict[str, str] | None = None, **more: object) -> ModelCall:
    return answers.read(Dialect.RESPONSES, {"model": "m", "input": [HELLO], **more}, headers)


def output(request: ModelCall, events: list[AnswerEvent]) -> list[dict[str, Any]]:
    """Return the items of a whole answer, which must be those of its stream."""
    whole = answers.whole(request, events)["output"]
    streamed = sse_events(answers.stream(request, events))
    assert [data["item"] for name, data in streamed if name == "response.output_item.done"] == whole
    assert streamed[-1][1]["response"]["output"] == whole
    return whole


def test_the_items_of_an_answer_are_one_message():
    items = [
        {"role": "developer", "content": "be kind"},
        HELLO,
        {
            "type": "reasoning",
            "id": "rs_x_0",
            "summary": [{"type": "summary_text", "text": "short"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": KEY,
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{ }"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c3", "name": "spawn", "namespace": "agents", "arguments": ""},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
    ]
    calls = (
        ClientToolCall("c1", "bash", "{ }"),
        ClientToolCall("c2", "patch", '{"input":"*** Begin"}'),
        ClientToolCall("c3", "agents__spawn", ""),
    )
    assert read(input=items, instructions="act").messages == (
        ClientMessage("system", "act"),
        ClientMessage("developer", "be kind"),
        ClientMessage("user", "hello"),
        ClientMessage("assistant", "x", "hm", calls, turn_key=KEY),
        ClientMessage("tool", "done", call_id="c2"),
        ClientMessage("tool", "ok", call_id="c1"),
        ClientMessage("assistant", "", "short"),
    )


def test_a_text_is_a_message_of_the_user():
    assert read(input="hello").messages == (ClientMessage("user", "hello"),)


def test_the_ids_of_items_name_the_turn_where_reasoning_does_not():
    item = {"type": "function_call", "id": f"fc_{KEY}_0", "call_id": "c", "name": "bash", "arguments": ""}
    assert read(input=[HELLO, item]).messages[1].turn_key == KEY
    assert read(input=[HELLO, item | {"id": "msg_01a203f0-4e64-7bb3"}]).messages[1].turn_key is None


def test_references_to_the_items_of_an_answer_are_one_message():
    ids = [f"rs_{KEY}_0", f"msg_{KEY}_1", f"fc_{KEY}_2", "msg_other_0"]
    references = [{"type": "item_reference", "id": one} for one in ids[:2]] + [{"id": one} for one in ids[2:]]
    first, second = read(input=[HELLO, *references]).messages[1:]
    assert (first.turn_key, first.references) == (KEY, {"reasoning", "text", "calls"})
    assert (second.turn_key, second.references) == ("other", {"text"})


def test_tools_of_every_kind_are_offered_as_functions():
    hosted = {"type": "web_search"}
    call = read(tools=[SHELL, PATCH, AGENTS, {"type": "local_shell"}, SEARCH, hosted])
    names = [tool["function"]["name"] for tool in call.tools]
    assert names == ["bash", "patch", "agents__spawn", "local_shell", "tool_search"]
    assert "start: X" in call.tools[1]["function"]["description"]
    assert call.ignored == ("tools[type=web_search]",)


def test_tools_may_stand_among_the_items():
    added = {"type": "additional_tools", "role": "developer", "tools": [AGENTS]}
    call = read(input=[added, HELLO])
    assert [tool["function"]["name"] for tool in call.tools] == ["agents__spawn"]
    assert call.messages == (ClientMessage("user", "hello"),)


def test_tools_that_the_client_found_stand_where_it_found_them():
    items = [
        HELLO,
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [AGENTS]},
    ]
    call = read(input=items, tools=[SEARCH])
    assert [tool["function"]["name"] for tool in call.tools] == ["tool_search"]
    assert [tool["function"]["name"] for tool in call.deferred_tools] == ["agents__spawn"]
    assert call.messages[1].calls == (ClientToolCall("c", "tool_search", '{"query":"q"}'),)
    assert "agents__spawn" in call.messages[2].text


@pytest.mark.parametrize(
    ("change", "error", "path"),
    [
        ({"input": None}, InvalidFieldError, "input"),
        ({"input": 3}, InvalidFieldError, "input"),
        ({"input": [{"role": "robot", "content": ""}]}, InvalidFieldError, "input.0.role"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, InvalidFieldError, "input.0.name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            UnsupportedContentError,
            "input.0.content.0",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
            UnsupportedContentError,
            "input.0.output.0",
        ),
        ({"previous_response_id": "resp_1"}, RefusedParameterError, "previous_response_id"),
        ({"conversation": {"id": "x"}}, RefusedParameterError, "conversation"),
        ({"background": True}, RefusedParameterError, "background"),
        ({"include": ["message.output_text.logprobs"]}, RefusedParameterError, "include"),
        ({"tools": [{"type": "function"}]}, InvalidFieldError, "tools.0.name"),
        ({"text": {"format": {"type": "grammar"}}}, InvalidFieldError, "text.format.type"),
        ({"input": [{"type": "item_reference", "id": "msg-1"}]}, InvalidFieldError, "input.0.id"),
        ({"max_output_tokens": 0}, InvalidFieldError, "max_output_tokens"),
        ({"instructions": []}, InvalidFieldError, "instructions"),
    ],
)
def test_what_cannot_be_read_is_named(change, error, path):
    with pytest.raises(error) as caught:
        read(**change)
    assert [field.path for field in caught.value.fields] == [path]
    told = CODECS[Dialect.RESPONSES].error(caught.value)
    assert (told.status, json.loads(told.body)["error"]["param"]) == (400, path)


def test_what_asks_for_nothing_is_not_refused():
    call = read(previous_response_id=None, background=False, top_logprobs=0, include=["reasoning.encrypted_content"])
    assert call.ignored == ("include",)


def test_a_stream_has_every_event_in_order_and_one_id_an_item():
    events = sse_events(answers.stream(read(stream=True), answers.full_answer()))
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name for name, _ in events if not (name or "").endswith(".delta")]
    item = "response.output_item"
    call = [f"{item}.added", "response.function_call_arguments.done", f"{item}.done"]
    assert names == [
        "response.created",
        "response.in_progress",
        f"{item}.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        f"{item}.done",
        f"{item}.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        f"{item}.done",
        *call,
        *call,
        "response.completed",
    ]
    final = events[-1][1]["response"]
    assert final["id"] == events[0][1]["response"]["id"] == f"resp_{KEY}"
    for index, whole in enumerate(final["output"]):
        ids = {data.get("item_id") or data["item"]["id"] for _, data in events if data.get("output_index") == index}
        assert ids == {whole["id"]}
    deltas = {"output_text": TEXT, "reasoning_summary_text": REASONING}
    for kind, text in deltas.items():
        assert "".join(data["delta"] for name, data in events if name == f"response.{kind}.delta") == text


def test_the_items_of_an_answer_hold_what_was_sampled():
    reasoning, text, *calls = output(read(), answers.full_answer())
    assert reasoning["summary"] == [{"type": "summary_text", "text": REASONING}]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": REASONING}]
    assert reasoning["encrypted_content"] == KEY
    assert text["content"][0]["text"] == TEXT
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == list(CALLS)


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        (
            "patch",
            '{"input": "*** Begin\\n"}',
            {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\n"},
        ),
        (
            "agents__spawn",
            '{"a":1}',
            {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": '{"a":1}'},
        ),
        (
            "local_shell",
            '{"command":["ls"]}',
            {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls"]}},
        ),
        (
            "tool_search",
            '{"query":"q"}',
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}},
        ),
        ("local_shell", '{"comm', {"type": "function_call", "name": "local_shell", "arguments": '{"comm'}),
        ("patch", '{"inp', {"type": "custom_tool_call", "input": '{"inp'}),
        ("bash", '{"comm', {"type": "function_call", "name": "bash", "arguments": '{"comm'}),
    ],
)
def test_calls_go_back_in_the_form_in_which_their_tools_were_declared(name, arguments, item):
    request = read(tools=[SHELL, PATCH, AGENTS, {"type": "local_shell"}, SEARCH])
    [told] = output(request, answers.answer(answers.call(0, "c", name, arguments)))
    assert item.items() <= told.items()
    assert told["call_id"] == "c"


def test_an_answer_that_was_cut_is_incomplete():
    events = answers.answer([TextDelta("hi")], finish=FinishReason.LENGTH)
    whole = answers.whole(read(), events)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert sse_events(answers.stream(read(), events))[-1][0] == "response.incomplete"


def test_the_form_that_was_asked_for_comes_back():
    asked = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    for form, call in ((asked, read(text={"format": asked})), ({"type": "text"}, read())):
        assert answers.whole(call, answers.answer())["text"] == {"format": form}


def test_an_empty_answer_has_no_items():
    assert answers.whole(read(), answers.answer())["output"] == []


def test_keep_alives_repeat_that_the_response_is_in_progress():
    writer = CODECS[Dialect.RESPONSES].open_stream(read(stream=True))
    assert sse_events(writer.keep_alive()) == []
    sent = writer.write(AnswerBegin(KEY, 1)) + writer.keep_alive()
    assert [name for name, _ in sse_events(sent)] == ["response.created"] + ["response.in_progress"] * 2


def test_an_error_in_a_stream_is_a_response_that_failed():
    writer = CODECS[Dialect.RESPONSES].open_stream(read(stream=True))
    [(name, event)] = sse_events(writer.fail(ContextOverflowError(200, 100)))
    assert name == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "context_length_exceeded"


def test_lanes_of_codex():
    headers = {"user-agent": "codex_exec/0.169.0", "session-id": "s", "thread-id": "t"}
    lane = read(headers).lane
    assert (lane.client, lane.session, lane.agent, lane.purpose) == ("codex", "s", "", "")
    lane = read({**headers, "x-codex-parent-thread-id": "p", "x-openai-subagent": "collab_spawn"}).lane
    assert (lane.session, lane.agent, lane.parent, lane.purpose) == ("s", "t", "p", "subagent")
    lane = read({**headers, "x-codex-turn-metadata": '{"request_kind":"compaction"}'}).lane
    assert lane.purpose == "compaction"
    assert read(prompt_cache_key="k").lane.session == "k"
