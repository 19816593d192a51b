"""Every model API gives a call's arguments as they were sampled, whole and streamed: an edit of indentation is one."""

import json
from typing import Any

import pytest

from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.capture.splitter import Splitter
from rollout_service.gateway.contract import AnswerBegin, AnswerEvent, Dialect, ModelCall
from tests.support.gateway import answers
from tests.support.samples import generation
from tests.support.tokens.calls import PARAMETERS, TOOL, written
from tests.support.tokens.chat_formats import load

FAMILIES = ("qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "hy3", "laguna-xs.2", "minimax-m2", "kimi-k2")
ARGUMENTS = {
    "path": "    return 1\n",
    "text": "\r\n\t{'a': <b/>}\n        return 1\n",
    "maybe": " 5",
    "count": 5,
    "flag": False,
    "items": [" a\n", None, 1.5],
}
FUNCTION = {"name": "write", "description": "Write a file."}
GOOGLE_STREAM = "/v1beta/models/m:streamGenerateContent?alt=sse"
USER = {"role": "user", "content": "go"}


def request(dialect: Dialect, stream: bool) -> ModelCall:
    """Read a request that offers the tool in the dialect's own way."""
    match dialect:
        case Dialect.CHAT:
            body: dict[str, Any] = {"messages": [USER], "tools": [TOOL]}
        case Dialect.RESPONSES:
            tool = {"type": "function", "parameters": PARAMETERS, "strict": False, **FUNCTION}
            body = {"input": "go", "tools": [tool]}
        case Dialect.ANTHROPIC:
            body = {"messages": [USER], "tools": [{"input_schema": PARAMETERS, **FUNCTION}], "max_tokens": 99}
        case Dialect.GOOGLE:
            declared = {"functionDeclarations": [{"parametersJsonSchema": PARAMETERS, **FUNCTION}]}
            body = {"contents": [{"parts": [{"text": "go"}]}], "tools": [declared]}
            return answers.read(dialect, body, path=GOOGLE_STREAM if stream else "/v1beta/models/m:generateContent")
    return answers.read(dialect, {"model": "m", "stream": stream, **body})


def whole_arguments(dialect: Dialect, answer: Any) -> Any:
    """Return the arguments of the only call of a whole answer."""
    match dialect:
        case Dialect.CHAT:
            return json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
        case Dialect.RESPONSES:
            return json.loads(next(item["arguments"] for item in answer["output"] if "arguments" in item))
        case Dialect.ANTHROPIC:
            return next(block["input"] for block in answer["content"] if "input" in block)
        case Dialect.GOOGLE:
            return next(part["functionCall"]["args"] for part in parts(answer) if "functionCall" in part)


def parts(answer: Any) -> list[Any]:
    found: list[Any] = answer["candidates"][0]["content"]["parts"]
    return found


def streamed_arguments(dialect: Dialect, content: bytes) -> Any:
    """Return the arguments of the only call of a stream, joined."""
    events = [event for _, event in answers.sse_events(content) if isinstance(event, dict)]
    match dialect:
        case Dialect.CHAT:
            deltas = (choice["delta"] for event in events for choice in event["choices"])
            calls = (call for delta in deltas for call in delta.get("tool_calls") or ())
            return json.loads("".join(call["function"].get("arguments") or "" for call in calls))
        case Dialect.RESPONSES:
            kind = "response.function_call_arguments.delta"
            return json.loads("".join(event["delta"] for event in events if event["type"] == kind))
        case Dialect.ANTHROPIC:
            deltas = (event["delta"] for event in events if event["type"] == "content_block_delta")
            return json.loads("".join(delta.get("partial_json", "") for delta in deltas))
        case Dialect.GOOGLE:
            found = (part for event in events for part in parts(event))
            return next(part["functionCall"]["args"] for part in found if "functionCall" in part)


@pytest.fixture(scope="module", params=FAMILIES)
def sampled(tmp_path_factory, request):
    renderer = load(tmp_path_factory.mktemp("formats") / request.param, request.param)
    return renderer, *written(renderer, ARGUMENTS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_arguments_reach_the_program_as_they_were_sampled(sampled, dialect, stream):
    renderer, prompt, output = sampled
    call = request(dialect, stream)
    splitter = Splitter(renderer, prompt, call.tools)
    events: list[AnswerEvent] = []
    for token in output:
        events += splitter.feed([token])
    answer = answers.answer(events, splitter.finish())
    found = (
        streamed_arguments(dialect, answers.stream(call, answer))
        if stream
        else whole_arguments(dialect, answers.whole(call, answer))
    )
    assert json.dumps(found) == json.dumps(ARGUMENTS)


def test_a_tool_that_was_made_known_later_is_called_by_its_schema(sampled):
    renderer, _, output = sampled
    tool = {"input_schema": PARAMETERS, "defer_loading": True, **FUNCTION}
    call = answers.read(Dialect.ANTHROPIC, {"messages": [USER], "tools": [tool]})
    events = TurnCapture(renderer).plan(call).finish(generation(output))
    begin = AnswerBegin(answers.KEY, 1)
    found = whole_arguments(Dialect.ANTHROPIC, answers.whole(call, [begin, *events]))
    assert json.dumps(found) == json.dumps(ARGUMENTS)
