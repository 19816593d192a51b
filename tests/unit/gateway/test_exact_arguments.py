"""A call's arguments reach the program as they were sampled: an edit of indentation is one."""

import json

import pytest

from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.capture.splitter import Splitter
from rollout_service.gateway.contract import AnswerEvent, CallArguments, Dialect
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


def arguments_of(events: list[AnswerEvent]) -> str:
    """Return the arguments of the only call, written anew."""
    text = "".join(event.text for event in events if isinstance(event, CallArguments))
    return json.dumps(json.loads(text))


@pytest.fixture(scope="module", params=FAMILIES)
def sampled(tmp_path_factory, request):
    renderer = load(tmp_path_factory.mktemp("formats") / request.param, request.param)
    return renderer, *written(renderer, ARGUMENTS)


def test_arguments_are_those_that_were_sampled(sampled):
    renderer, prompt, output = sampled
    splitter = Splitter(renderer, prompt, [TOOL])
    events = [event for token in output for event in splitter.feed([token])]
    assert arguments_of([*events, *splitter.finish()]) == json.dumps(ARGUMENTS)


def test_a_tool_that_was_made_known_later_is_called_by_its_schema(sampled):
    renderer, _, output = sampled
    tool = {"name": "write", "description": "Write a file.", "input_schema": PARAMETERS, "defer_loading": True}
    body = {"messages": [{"role": "user", "content": "go"}], "tools": [tool]}
    planned = TurnCapture(renderer).plan(answers.read(Dialect.ANTHROPIC, body))
    assert arguments_of(planned.finish(generation(output))) == json.dumps(ARGUMENTS)
