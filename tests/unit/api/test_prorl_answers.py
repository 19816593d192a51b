"""The answers to a trainer for the ProRL Agent server: rows of exactly the sampled tokens, and none of failures."""

import random

import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutState, StopReason
from api_schemas.trajectories import FinishReason, Message, Segment, SegmentRole, ToolCall
from rollout_service.server.api.routes.prorl import ProcessSampling
from rollout_service.server.api.routes.support.prorl_answers import process_answer
from tests.support.adapters.prorl_trainer import SAMPLING, Row, rows_of
from tests.support.adapters.rollouts import rollout, segment

USER, TOOL, SAID = (Message(role=role, content=role) for role in ("user", "tool", "assistant"))
SEGMENT = segment([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])


def answer(segments: list[Segment], messages: list[Message], **fields) -> dict:
    one = rollout(*segments, **fields)
    said = {"messages": messages, "finish_reasons": [FinishReason.STOP] * 2}
    return process_answer(one.model_copy(update={"trajectory": one.trajectory.model_copy(update=said)}), [])


def row(given: dict) -> Row:
    (only,) = rows_of({"i": {0: given}})
    return only


def assert_is(only: Row, whole: Segment) -> None:
    assert only.prompt + only.response == whole.token_ids
    assert [0] * len(only.prompt) + only.loss_mask == whole.loss_mask
    assert [0.0] * len(only.prompt) + only.logprobs == whole.logprobs


@pytest.mark.parametrize(("reward", "has_row"), [(1.0, True), (0.5, True), (0.0, True), (None, False)])
def test_a_rollout_without_a_reward_has_no_messages_to_train_on(reward, has_row):
    given = answer([SEGMENT], [USER, SAID, TOOL, SAID], reward=reward)
    assert (given["reward"], given["resolved"]) == (reward, reward == 1.0)
    assert bool(given["messages"]) == has_row


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([USER, SAID, TOOL, SAID], id="plain"),
        pytest.param([USER, USER, SAID, TOOL, TOOL, USER, SAID, TOOL], id="several-between"),
        pytest.param([USER, SAID, USER, SAID, TOOL, SAID], id="an-example-in-the-prompt"),
        pytest.param([SAID, USER, SAID, TOOL, SAID], id="begins-with-an-example"),
        pytest.param([USER, SAID, SAID], id="nothing-between"),
        pytest.param([USER, SAID], id="a-message-missing"),
        pytest.param([], id="all-missing"),
    ],
)
def test_the_ids_of_the_messages_are_the_segment(messages):
    given = answer([SEGMENT], messages)
    assert_is(row(given), SEGMENT)
    sampled = [each for each in given["messages"] if each["role"] == "assistant" and each["token_ids"]]
    assert [(each["token_ids"], each["input_ids"]) for each in sampled] == [
        ([3, 4], [1, 2]),
        ([7], [1, 2, 3, 4, 5, 6]),
    ]
    assert all(each["input_ids"] is each["logprobs"] is None for each in given["messages"] if each not in sampled)


def test_any_conversation_becomes_its_row():
    chance = random.Random(7)
    for _ in range(300):
        lengths = [chance.randint(1, 4) for _ in range(2 * chance.randint(1, 6))]
        mask = [number % 2 for number, length in enumerate(lengths) for _ in range(length)]
        whole = segment([chance.randint(0, 99) for _ in mask], mask)
        between = ([*chance.choices([USER, TOOL, SAID], k=chance.randint(0, 3)), SAID] for _ in lengths[::2])
        messages = [message for each in between for message in each]
        assert_is(row(answer([whole], messages[chance.randint(0, 2) :])), whole)


def test_a_conversation_of_several_segments_gives_the_last_of_the_agents_own():
    last = segment([1, 2, 8, 9], [0, 0, 0, 1], parent=0)
    other = segment([5, 6], [0, 1], parent=0).model_copy(update={"role": SegmentRole.SUBAGENT})
    assert_is(row(answer([SEGMENT, last, other], [USER, SAID])), last)
    assert answer([other], [USER, SAID])["messages"] == []
    assert answer([segment([1, 2], [0, 0])], [USER])["messages"] == []


def test_messages_have_that_servers_form():
    good = ToolCall(id="1", name="add", arguments={"a": 1}, raw="x")
    bad = ToolCall(id="2", name=None, arguments=None, raw="{", error="invalid_json")
    said = Message(role="assistant", content="So.", reasoning="Hm.", tool_calls=[good, bad])
    given = answer([segment([1, 2], [0, 1])], [USER, said])
    user, message = given["messages"]
    assert user == {
        "role": "user",
        "content": "user",
        "token_ids": [1],
        "input_ids": None,
        "logprobs": None,
    }
    assert message == {
        "role": "assistant",
        "content": "<think>\nHm.\n</think>\n\nSo.",
        "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}],
        "token_ids": [2],
        "input_ids": [1],
        "logprobs": [-0.2],
    }
    assert given["end_properly"] is False  # a call is malformed
    assert answer([segment([1, 2], [0, 1])], [USER, SAID])["end_properly"] is True


@pytest.mark.parametrize(
    ("stop", "begins", "left_out"),
    [
        (StopReason.FINISHED, None, False),
        (StopReason.ANSWERED, None, False),
        (StopReason.MAX_TURNS, "RuntimeError: Agent reached maximum iteration in headless mode", True),
        (StopReason.MALFORMED, "AgentToolCallError", False),
        (StopReason.TRUNCATED, "AgentFormatError", True),
        (StopReason.CONTEXT_FULL, "AgentError: the agent stopped: context_full", True),
        (StopReason.AGENT_TIMEOUT, "AgentError: the agent stopped: agent_timeout", True),
    ],
)
def test_an_agent_that_stopped_early_is_an_error_and_has_its_reward(stop, begins, left_out):
    given = answer([SEGMENT], [USER, SAID, TOOL, SAID], stop_reason=stop)
    assert (given["success"], given["finish"]) == (begins is None,) * 2
    assert (given["error"] or "").startswith(begins or "")
    assert (given["error"] is None, given["filter"]) == (begins is None, left_out)
    assert (given["critical_error"], given["resolved"]) == (None, True)
    assert row(given).error_mask == (begins is not None)


@pytest.mark.parametrize(
    ("code", "stage", "critical"),
    [
        ("sandbox_start_failed", "init", "init"),
        ("engine_failed", "rollout", "run"),
        ("grader_failed", "evaluate", "eval"),
        ("attempts_exhausted", None, "run"),
        ("stage_timeout", "rollout", "timeout"),
    ],
)
def test_a_failure_names_its_phase(code, stage, critical):
    error = ErrorInfo(code=code, boundary=Boundary.SANDBOX, message="why", stage=stage)
    one = rollout(SEGMENT, reward=None, state=RolloutState.FAILED).model_copy(update={"error": error})
    given = process_answer(one, [])
    assert (given["critical_error"], given["timing"]["timeout_triggered"]) == (
        critical,
        critical == "timeout",
    )
    assert given["error"].endswith(f"{code}: why")
    said = [given[name] for name in ("messages", "success", "resolved", "filter", "end_properly")]
    assert said == [[], False, False, True, False]


def test_the_ids_of_the_instance_come_back_as_they_are():
    one = rollout(SEGMENT)
    ids = {"instance_id": "repo__1", "trajectory_id": 3}
    task = one.task.model_copy(update={"instance": ids})
    given = process_answer(one.model_copy(update={"task": task}), [])
    assert ids.items() <= given.items()
    assert {name: process_answer(one, [])[name] for name in ids} == {
        "instance_id": None,
        "trajectory_id": None,
    }


def test_sampling_parameters_are_read_as_that_server_reads_them():
    said = ProcessSampling.model_validate(SAMPLING)
    assert (said.limits().max_turns, said.limits().max_turn_tokens, said.limits().max_tokens) == (
        5,
        32_768,
        32_768,
    )
    text = ProcessSampling.model_validate(SAMPLING | {"token_level_generation": False, "stop": ["\n"], "seed": 3})
    assert (text.limits().max_turn_tokens, text.limits().max_tokens) == (1_536, None)
    assert (text.sampling().temperature, text.sampling().stop, text.sampling().seed) == (1.0, ["\n"], 3)
    plain = ProcessSampling()
    assert (plain.sampling().temperature, plain.sampling().top_p, plain.limits().max_turns) == (0.0, 1.0, 2)
