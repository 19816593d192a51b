"""Rows of NeMo Gym are refused by field, and a conversation becomes a response that its servers can verify."""

import json
from typing import Any

import pytest
from pydantic import JsonValue

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import Message, ToolCall
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.nemo_gym.environment import GymTask
from rollout_service.environments.bridges.nemo_gym.server import as_response, read_reward, read_verdict
from rollout_service.environments.dataset_files import read_instance
from rollout_service.testing.scripted_policy import call

TOOL: dict[str, JsonValue] = {"type": "function", "name": "look", "description": "Look.", "strict": True}
SAID: dict[str, JsonValue] = {"role": "user", "content": "Where is it?"}


def task(**parameters: JsonValue) -> dict[str, JsonValue]:
    return {
        "server": "mcqa",
        "row": {"responses_create_params": {"input": [SAID], **parameters}, "answer": 3},
    }


def test_a_row_begins_with_its_instructions_and_its_messages():
    parts: JsonValue = [{"type": "input_text", "text": "Where "}, {"type": "input_text", "text": "is it?"}]
    first: JsonValue = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    read = read_instance(GymTask, task(instructions="You see.", input=first, tools=[TOOL]))
    said = [(message.role, message.content) for message in read.messages()]
    assert said == [("system", "You see."), ("developer", "Be brief."), ("user", "Where is it?")]
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    assert read.tools() == [{"type": "function", "function": function}]


def test_an_input_may_be_a_text_and_tools_may_be_null():
    read = read_instance(GymTask, task(input="Where is it?", tools=None))
    assert [(one.role, one.content) for one in read.messages()] == [("user", "Where is it?")]
    assert read.tools() == []


INPUT = "instance.row.responses_create_params.input"
TOOLS = "instance.row.responses_create_params.tools"


@pytest.mark.parametrize(
    ("instance", "path"),
    [
        ({"server": "mcqa"}, "instance.row"),
        ({"server": "../mcqa", "row": task()["row"]}, "instance.server"),
        ({"row": task()["row"]}, "instance.server"),
        ({"server": "mcqa", "row": {"answer": 3}}, "instance.row.responses_create_params"),
        (task(input=[]), INPUT),
        (task(input=[{"role": "assistant", "content": "Here."}]), f"{INPUT}.0.role"),
        (task(input=[SAID, {"type": "reasoning", "role": "user", "content": "x"}]), f"{INPUT}.1.type"),
        (
            task(input=[{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]),
            f"{INPUT}.0.content.0.type",
        ),
        (task(tools=[TOOL, TOOL | {"name": "verify"}]), f"{TOOLS}.1.name"),
        (task(tools=[TOOL | {"name": "../reset"}]), f"{TOOLS}.0.name"),
        (task(tools=[TOOL | {"type": "web_search"}]), f"{TOOLS}.0.type"),
        (task(tools=[TOOL, TOOL]), TOOLS),
        (task() | {"config": 3}, "instance.config"),
    ],
)
def test_a_bad_row_is_refused_with_the_path_of_the_field(instance, path):
    with pytest.raises(InvalidFieldError) as caught:
        read_instance(GymTask, instance)
    assert [field.path for field in caught.value.fields] == [path]


def test_a_response_has_what_was_said_in_order_and_leaves_out_what_could_not_be_read():
    malformed = ToolCall(id="b", name=None, arguments=None, raw="{", error="invalid_json")
    good = call("look", at="sky").model_copy(update={"id": "a"})
    messages = [
        Message(role="assistant", reasoning="Hm.", tool_calls=[good, malformed]),
        Message(role="tool", content="blue", tool_call_id="a"),
        Message(role="tool", content="malformed", tool_call_id="b"),
        Message(role="assistant", content="Again.", tool_calls=[good]),
        Message(role="tool", content="gray", tool_call_id="a"),
        Message(role="assistant", content="It is gray."),
    ]
    made = as_response(messages, [TOOL], Usage(prompt_tokens=3, sampled_tokens=4), StopReason.TRUNCATED)
    output: list[dict[str, Any]] = made["output"]
    kinds = ["reasoning", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in output] == [*kinds, *kinds[1:]]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    answers = [(item["call_id"], item["output"]) for item in output if item["type"] == "function_call_output"]
    assert answers == list(zip(calls, ["blue", "gray"], strict=True))
    assert len(set(calls)) == 2
    assert json.loads(output[1]["arguments"]) == {"at": "sky"}
    assert output[-1]["content"][0]["text"] == "It is gray."
    assert made["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made["usage"]["total_tokens"] == 7


def test_a_policy_that_said_nothing_has_an_empty_message():
    (item,) = as_response([Message(role="assistant")], [], Usage())["output"]
    assert item["content"][0]["text"] == ""


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"reward": None},
        {"reward": "1"},
        {"reward": float("nan")},
        {"reward": 0.0, "_ng_failure_class": "judge"},
    ],
)
def test_a_verdict_without_a_reward_is_a_failure(verdict):
    with pytest.raises(EnvironmentFailedError, match="gave no reward"):
        read_reward(verdict)


def test_the_parts_are_the_verdicts_own_numbers():
    verdict = {"reward": 1, "answer": 3, "correct": True, "text": "x", "share": 0.5, "bad": float("inf")}
    score = read_verdict(verdict, {"answer": 3})
    assert (score.reward, score.parts) == (1.0, {"correct": 1.0, "share": 0.5})
