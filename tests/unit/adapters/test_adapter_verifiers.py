"""Episodes for verifiers keep each segment exact, and have no trace without a reward."""

import json
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel

from api_schemas.rollouts import RolloutState, StopReason
from api_schemas.trajectories import FinishReason, Message, ToolCall
from rollout_client.adapters import verifiers
from rollout_client.adapters.samples import samples_of
from rollout_client.adapters.submit import RolloutSubmitter, TaskRowError
from tests.support.adapters.modules import modules
from tests.support.adapters.rollouts import TASK, FakeClient, rollout, segment

pytestmark = pytest.mark.anyio

TWO_TURNS = segment([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])
T, C = TypeVar("T"), TypeVar("C")


class Trace(SimpleNamespace):
    """verifiers' `Trace`, with the fields and methods that the adapter uses."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(nodes=[], calls=[], info={}, rewards={}, metrics={}, ok=False, **fields)

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def record_reward(self, name: str, value: float) -> None:
        self.rewards[name] = value

    def stop(self, condition: str) -> None:
        self.stop_condition = condition


class Taskset(Generic[T, C]):
    """verifiers' `Taskset`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class Env(Generic[T]):
    """verifiers' `Env`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class Task(Generic[T]):
    """verifiers' `Task`."""

    key = hash = "a-hash"

    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, config


class TaskData(BaseModel):
    """verifiers' `TaskData`."""

    prompt: str | None = None


class AgentConfig(BaseModel):
    """verifiers' `AgentConfig`."""

    harness: Any = None
    runtime: Any = None
    model: Any = None
    client: Any = None
    sampling: Any = None


class EnvConfig(BaseModel):
    """verifiers' `EnvConfig`."""

    env_id: str = "rollout-tasks"


@pytest.fixture
def library(monkeypatch):
    """Install stand-ins of the parts of verifiers that the adapter uses."""
    plain = dict.fromkeys(("MessageNode", "ModelCall", "TraceTask", "EnvInfo", "AgentInfo", "Error"), SimpleNamespace)
    episode = type("Episode", (SimpleNamespace,), {"traces": None, "ok": False})
    parts = {"Taskset": Taskset, "Env": Env, "Task": Task, "TaskData": TaskData, "Trace": Trace}
    configs = {"AgentConfig": AgentConfig, "EnvConfig": EnvConfig, "TasksetConfig": BaseModel}
    made = {"Episode": lambda **fields: episode(traces=[], errors=[], **fields)}
    modules(monkeypatch, "verifiers.v1", **plain, **parts, **configs, **made)
    modules(monkeypatch, "verifiers.v1.types", Usage=SimpleNamespace)
    verifiers.make_classes.cache_clear()
    yield
    verifiers.make_classes.cache_clear()


async def run_episode(client: FakeClient, **given: Any) -> Any:
    env = verifiers.ServiceEnv(verifiers.make_classes()["ServiceEnvConfig"]())
    env.submitter = client.submitter(**given)
    data = verifiers.make_classes()["ServiceTaskData"](**TASK.model_dump(mode="json"))
    sampling = SimpleNamespace(model_dump=lambda **_: {"temperature": 0.5, "max_tokens": 64})
    ctx = SimpleNamespace(model="m", client=None, sampling=sampling)
    return await env.run_episode(verifiers.make_classes()["ServiceTask"](data), ctx)


def conversation(*messages: Message) -> Any:
    one = rollout(TWO_TURNS)
    told = {"messages": list(messages), "finish_reasons": [FinishReason.STOP, FinishReason.LENGTH]}
    return one.model_copy(update={"trajectory": one.trajectory.model_copy(update=told)})


def test_a_branch_has_each_token_once_and_the_messages_where_they_belong():
    call = ToolCall(id="c", name="add", arguments={"a": 1}, raw="<add>")
    one = conversation(
        Message(role="system", content="Be brief."),
        Message(role="user", content="2+2"),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content="4", tool_call_id="c", name="add"),
        Message(role="assistant", content="It is 4."),
    )
    nodes = list(verifiers.branch_of(one, samples_of(one)[0]))
    assert [(node.message.role, node.token_ids, node.turn is not None) for node in nodes] == [
        ("system", [], False),
        ("user", [1, 2], False),
        ("assistant", [3, 4], True),
        ("tool", [5, 6], False),
        ("assistant", [7], True),
    ]
    assert [verifiers.message_fields(node.message)["role"] for node in nodes[:2]] == ["system", "user"]
    (told,) = verifiers.message_fields(nodes[2].message)["tool_calls"]
    assert (told["name"], json.loads(told["arguments"])) == ("add", {"a": 1})
    assert verifiers.message_fields(nodes[3].message)["tool_call_id"] == "c"


def test_texts_are_empty_where_a_compaction_has_removed_turns():
    one = conversation(Message(role="user", content="2+2"), Message(role="assistant", content="It is 4."))
    nodes = list(verifiers.branch_of(one, samples_of(one)[0]))
    assert [(node.message.content, node.token_ids) for node in nodes] == [
        ("", [1, 2]),
        ("", [3, 4]),
        ("", [5, 6]),
        ("", [7]),
    ]


async def test_each_segment_is_a_branch(library):
    other = segment([1, 9, 5], [0, 0, 1], parent=0)
    client = FakeClient(rollout(TWO_TURNS, other, stop_reason=StopReason.MAX_TURNS))
    episode = await run_episode(client)
    (trace,) = episode.traces
    assert (episode.ok, trace.ok, trace.rewards, trace.stop_condition) == (
        True,
        True,
        {"reward": 1.0},
        "max_turns",
    )
    roots = [place for place, node in enumerate(trace.nodes) if node.parent is None]
    assert roots == [0, 4]
    assert [node.parent for node in trace.nodes] == [None, 0, 1, 2, None, 4]
    assert [token for node in trace.nodes[:4] for token in node.token_ids] == [1, 2, 3, 4, 5, 6, 7]
    assert [sampled for node in trace.nodes for sampled in node.mask] == [
        *[False, False, True, True, False, False, True],
        *[False, False, True],
    ]
    assert [node.logprobs for node in trace.nodes if node.sampled] == [[-0.3, -0.4], [-0.7], [-0.5]]
    assert [(call.node, call.usage.prompt_tokens) for call in trace.calls] == [(1, 2), (3, 6), (5, 2)]
    (request,) = client.requests
    assert (request.task, request.limits.max_turn_tokens, request.sampling.temperature) == (TASK, 64, 0.5)


async def test_an_episode_without_a_reward_has_an_error_and_no_trace(library):
    failed = rollout(reward=None, state=RolloutState.FAILED)
    episode = await run_episode(FakeClient(failed, failed), retries=1)
    assert (episode.ok, episode.traces) == (False, [])
    assert [error.type for error in episode.errors] == ["sandbox_start_failed"]


def test_tasks_come_from_a_file(library, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(TASK.model_dump(mode="json")) + "\n\n")
    config = verifiers.make_classes()["ServiceTasksetConfig"](rows=rows)
    (task,) = verifiers.ServiceTaskset(SimpleNamespace(**dict(config), task=None)).load()
    assert (task.data.instance, task.data.prompt) == (TASK.instance, "2+2")
    rows.write_text("{}")
    given = {"environment": "", "split": None}
    with pytest.raises(TaskRowError):
        list(verifiers.tasks_of(RolloutSubmitter(), rows=rows, **given))
    with pytest.raises(ValueError, match="`environment`"):
        list(verifiers.tasks_of(RolloutSubmitter(), rows=None, **given))


def test_messages_keep_calls_results_and_what_was_malformed():
    calls = [
        ToolCall(id="a", name="add", arguments={"x": 1}, raw="add(1)"),
        ToolCall(id="b", name=None, arguments=None, raw="add(", error="invalid_json"),
    ]
    said = [
        Message(role="developer", content="Be brief."),
        Message(role="user", content="Add."),
        Message(role="assistant", content="Well", reasoning="Hm.", tool_calls=calls),
        Message(role="tool", content="2", tool_call_id="a", name="add"),
    ]
    messages = [verifiers.message_fields(message) for message in said]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "Hm."
    assert messages[2]["tool_calls"] == [
        {"id": "a", "name": "add", "arguments": '{"x": 1}'},
        {"id": "b", "name": "", "arguments": "add("},
    ]
    assert messages[3] == {"role": "tool", "content": "2", "tool_call_id": "a", "name": "add"}
