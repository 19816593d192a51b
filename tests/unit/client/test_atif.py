"""Rollouts as ATIF: every turn with exactly the ids that its engine saw and sampled."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import Rollout
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Segment, ToolCall
from rollout_client.adapters.atif import to_atif
from tests.support import samples

IDS = st.lists(st.integers(0, 50_000), min_size=1, max_size=5)
TURNS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5)
"""Of each turn: what the prompt adds to the conversation, and what was sampled."""


def segment(turns: list[tuple[list[int], list[int]]], first: int = 0) -> Segment:
    token_ids, turn_ids = list[int](), list[int]()
    for number, (added, sampled) in enumerate(turns, start=first):
        token_ids += [*added, *sampled]
        turn_ids += [-1] * len(added) + [number] * len(sampled)
    mask = [int(turn >= 0) for turn in turn_ids]
    logprobs = [-position / 7 if one else 0.0 for position, one in enumerate(mask)]
    versions = [one - 1 for one in mask]
    return samples.segment(token_ids, mask, logprobs=logprobs, versions=versions, turn_ids=turn_ids)


def call(name: str | None = "bash", **arguments: Any) -> ToolCall:
    broken = name is None
    return ToolCall(
        id="c1",
        name=name,
        arguments=None if broken else arguments,
        raw="<x",
        error="invalid_json" if broken else None,
    )


def rollout(messages: list[Message], *segments: Segment) -> Rollout:
    turns = max((turn for one in segments for turn in one.turn_ids), default=-1) + 1
    return samples.rollout(
        task=Task(environment="calc", instance={"a": 1}),
        attempt=1,
        reward=0.5,
        reward_parts={"x": 1.0},
        finished_at=samples.NOW,
        trajectory=samples.trajectory(*segments, messages=messages, turns=turns),
    )


def conversation(turns: int) -> list[Message]:
    talk = [Message(role="user", content="go"), Message(role="assistant", content="on")]
    return [message for _ in range(turns) for message in talk]


@given(TURNS, st.integers(0, 5))
def test_each_turn_has_its_prompt_and_its_tokens(turns, cut):
    parts = [segment(turns[:cut])] if turns[:cut] else []
    parts += [segment(turns[cut:], cut)] if turns[cut:] else []
    document = to_atif(rollout(conversation(len(turns)), *parts), version="1")
    steps = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["metrics"]["completion_token_ids"] for step in steps] == [sampled for _, sampled in turns]
    for step in steps:
        metrics = step["metrics"]
        assert metrics["prompt_tokens"] == len(metrics["prompt_token_ids"])
        assert metrics["completion_tokens"] == len(metrics["logprobs"]) == len(metrics["completion_token_ids"])
    for number, (one, after) in enumerate(pairwise(steps), start=1):
        if number != cut:  # within a segment, a prompt begins with the last prompt and what was sampled
            before = one["metrics"]["prompt_token_ids"] + one["metrics"]["completion_token_ids"]
            assert after["metrics"]["prompt_token_ids"][: len(before)] == before


def test_a_conversation_with_tools():
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content="a", reasoning="why", tool_calls=[call(command="ls")]),
        Message(role="tool", content="out", tool_call_id="c1", name="bash"),
        Message(role="assistant", tool_calls=[call(None)]),
        Message(role="tool", content="malformed", tool_call_id="c1"),
        Message(role="tool", content="of nobody", tool_call_id="c9"),
        Message(role="assistant", content="done"),
    ]
    document = to_atif(rollout(messages, segment([([1], [2]), ([3], [4]), ([5], [6])])), version="1", model="m")
    assert json.loads(json.dumps(document)) == document
    assert (document["schema_version"], document["agent"]["model_name"]) == ("ATIF-v1.8", "m")
    assert [step["step_id"] for step in document["steps"]] == [1, 2, 3, 4, 5]
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent", "agent"]
    first, second = document["steps"][2:4]
    assert first["reasoning_content"] == "why"
    assert first["tool_calls"] == [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}]
    assert first["observation"] == {"results": [{"source_call_id": "c1", "content": "out"}]}
    assert second["tool_calls"][0]["arguments"] == {"raw": "<x"}
    assert second["observation"]["results"][1] == {"content": "of nobody"}
    assert document["extra"]["reward"] == 0.5


def test_turns_that_match_no_message_are_left_out():
    replaced = rollout(conversation(1), segment([([1], [2]), ([3], [4])]))
    assert "metrics" not in to_atif(replaced, version="1")["steps"][1]


def test_a_rollout_without_a_conversation_is_refused():
    with pytest.raises(ValueError, match="has no conversation"):
        to_atif(rollout([]), version="1")
    with pytest.raises(ValueError, match="has no conversation"):
        to_atif(rollout([]).model_copy(update={"trajectory": None}), version="1")
