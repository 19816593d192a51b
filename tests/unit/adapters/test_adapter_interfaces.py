"""Adapters match the interfaces of trainers that cannot be installed here.

Each interface is recorded as data from the trainer's source: the names and order of a hook's parameters, and the
fields of its result. Stand-ins built from that data refuse whatever the real classes would refuse.
"""

import asyncio
import inspect
import json
import math
import pickle
import sys
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, create_model

from api_schemas.rollouts import RolloutState, StopReason
from api_schemas.trajectories import FinishReason, Message, ToolCall
from rollout_client.adapters import areal, nemo_gym, openrlhf, skyrl, slime, verl
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.samples import RowTooLongError, samples_of
from rollout_client.adapters.submit import NoRewardError
from tests.support.adapters.modules import modules
from tests.support.adapters.rollouts import TASK, FakeClient, rollout, segment
from tests.support.web_server import Answer, Asked, web_server

pytestmark = pytest.mark.anyio

ROW = TASK.model_dump(mode="json")
INTERFACES = {
    "verl 0.9.1": {
        "hook": "self sampling_params row",
        "made with": ("trainer_config server_manager tokenizer processor hf_model_type dataset_cls data_config tools"),
        "required": "prompt_ids response_ids response_mask metrics",
        "fields": (
            "prompt_ids response_ids response_mask response_logprobs routed_experts multi_modal_data "
            "reward_score num_turns metrics extra_fields mm_processor_kwargs mm_processor_output"
        ),
        "metrics": "generate_sequences tool_calls compute_score num_preempted",
    },
    "slime 2026-08-21": {
        "hook": "args sample sampling_params evaluation",
        "filter": "keep reason keep_when_insufficient",
        "status": "pending completed truncated aborted failed",
    },
    "skyrl 2026-08-21": {
        "hook": "self input_batch",
        "fields": (
            "prompt_token_ids response_ids rewards loss_masks stop_reasons rollout_metrics "
            "rollout_logprobs trajectory_ids trajectory_generation_times trajectory_time_splits "
            "rollout_expert_indices is_last_step env_metrics pixel_values image_grid_thw"
        ),
    },
    "areal 1.0.4": {
        "hook": "self engine data",
        "keys": "input_ids loss_mask logprobs versions attention_mask rewards",
    },
    "openrlhf 0.11.2": {
        "hook": "self prompt label sampling_params max_length hf_tokenizer llm_engine images",
        "fields": (
            "prompt label images mm_train_inputs reward scores observation_tokens action_ranges "
            "rollout_log_probs truncated extra_logs"
        ),
    },
    "nemo-gym 2026-08-22": {
        "run": "responses_create_params",
        "answer": "responses_create_params response reward",
        "item": "prompt_token_ids generation_token_ids generation_log_probs",
    },
}
TWO_TURNS = segment([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])


def two_segments(**fields: Any):
    return rollout(segment([1, 2, 3, 4], [0, 1, 1, 1]), segment([1, 9, 5], [0, 0, 1], parent=0), **fields)


def failed():
    return rollout(reward=None, state=RolloutState.FAILED, rollout_id="r-bad")


def parameters(hook: Any) -> list[str]:
    return list(inspect.signature(hook).parameters)


def names(trainer: str, part: str) -> list[str]:
    return INTERFACES[trainer][part].split()


# -- verl ------------------------------------------------------------------------


@pytest.fixture
def agent_loop(monkeypatch):
    """Return a function that makes an agent loop as verl does; verl's two models refuse unknown fields."""
    strict = {"extra": "forbid"}
    numbers: dict[str, Any] = dict.fromkeys(names("verl 0.9.1", "metrics"), (float, 0.0))
    metrics = create_model("AgentLoopMetrics", __config__=strict, **numbers)
    required = names("verl 0.9.1", "required")
    fields: dict[str, Any] = {name: (Any, ... if name in required else None) for name in names("verl 0.9.1", "fields")}
    output = create_model("AgentLoopOutput", __config__=strict, **fields)
    modules(
        monkeypatch,
        "verl.experimental.agent_loop.agent_loop",
        AgentLoopMetrics=metrics,
        AgentLoopOutput=output,
    )

    def make(
        client: FakeClient,
        response_length: int = 100,
        prompt_length: int = 50,
        use_v1: bool = False,
        **given: Any,
    ):
        lengths = SimpleNamespace(response_length=response_length, prompt_length=prompt_length)
        actor, trainer = SimpleNamespace(rollout=lengths), SimpleNamespace(use_v1=use_v1)
        config = SimpleNamespace(actor_rollout_ref=actor, trainer=trainer)
        made_with = dict.fromkeys(names("verl 0.9.1", "made with")) | {"trainer_config": SimpleNamespace(config=config)}
        loop = verl.RolloutAgentLoop(**made_with, url="http://node-3:1")
        assert loop.engines.submitter.url == "http://node-3:1"
        loop.engines = TrainerEngines("verl", client.submitter(**given))
        return loop

    return make


async def test_verl_gets_an_output_of_its_own_kind(agent_loop):
    assert parameters(verl.RolloutAgentLoop.run) == names("verl 0.9.1", "hook")
    client = FakeClient(rollout(TWO_TURNS))
    row = {"raw_prompt": [], "index": 7, "extra_info": ROW}
    output = await agent_loop(client).run({"temperature": 0.5, "top_k": -1, "logprobs": True}, **row)
    assert (output.prompt_ids, output.response_ids) == ([1, 2], [3, 4, 5, 6, 7])
    assert output.response_mask == [1, 1, 0, 0, 1]
    assert output.response_logprobs == [-0.3, -0.4, 0.0, 0.0, -0.7]
    assert (output.reward_score, output.num_turns) == (1.0, 2)
    assert output.extra_fields["max_global_steps"] == 3
    (request,) = client.requests
    assert (request.task, request.sampling.temperature, request.limits.max_tokens) == (TASK, 0.5, 100)


async def test_verl_gets_no_more_than_it_has_room_for(agent_loop):
    output = await agent_loop(FakeClient(two_segments()), response_length=2).run({}, **ROW)
    assert (output.response_ids, output.extra_fields["left_out"]) == ([2, 3], 2)


async def test_verl_gets_what_has_no_room_in_the_prompt_before_the_response(agent_loop):
    output = await agent_loop(FakeClient(rollout(TWO_TURNS)), prompt_length=1).run({}, **ROW)
    assert (output.prompt_ids, output.response_ids) == ([1], [2, 3, 4, 5, 6, 7])
    assert output.response_mask == [0, 1, 1, 0, 0, 1]
    assert output.response_logprobs == [0.0, -0.3, -0.4, 0.0, 0.0, -0.7]
    with pytest.raises(RowTooLongError, match="raise prompt_length"):
        await agent_loop(FakeClient(rollout(TWO_TURNS)), prompt_length=1, response_length=1).run({}, **ROW)


async def test_verls_default_trainer_gets_every_segment(agent_loop):
    first, last = await agent_loop(FakeClient(two_segments()), use_v1=True).run({}, **ROW)
    assert (first.response_ids, last.response_ids) == ([2, 3, 4], [5])
    assert {one.reward_score for one in (first, last)} == {1.0}
    # verl copies this field from the last output to the others, and has no other place to find it.
    assert last.extra_fields["reward_extra_info"] == {}
    assert last.extra_fields["left_out"] == 0
    small = agent_loop(FakeClient(two_segments()), use_v1=True, prompt_length=1, response_length=1)
    (only,) = await small.run({}, **ROW)
    assert (only.prompt_ids, only.response_ids, only.extra_fields["left_out"]) == ([1], [2], 3)


async def test_verl_gets_no_reward_that_nobody_earned(agent_loop):
    with pytest.raises(NoRewardError):
        await agent_loop(FakeClient(failed(), failed()), retries=1).run({}, **ROW)


# -- slime -----------------------------------------------------------------------


class Status(Enum):
    """slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)  # a field that slime's sample lacks is an error
class SlimeSample:
    """slime's `Sample`, with only the fields that the adapter uses."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)

    def get_reward_value(self, args: Any) -> float | None:
        return self.reward


SlimeSample.Status = Status


@pytest.fixture
def generate(monkeypatch):
    """Return a function that calls the custom generate function as slime does."""

    async def call(*answers, evaluation: bool = False, **sample: Any):
        client = FakeClient(*answers)
        monkeypatch.setattr(slime, "engines", lambda: TrainerEngines("slime", client.submitter()))
        params = {"temperature": 1.0, "top_k": -1, "max_new_tokens": 64, "no_stop_trim": True, "stop": None}
        return await slime.generate(SimpleNamespace(), SlimeSample(index=4, **sample), params, evaluation)

    return call


async def test_slime_gets_its_sample_filled(generate):
    assert parameters(slime.generate) == names("slime 2026-08-21", "hook")
    assert [one.value for one in Status] == names("slime 2026-08-21", "status")
    (sample,) = await generate(rollout(TWO_TURNS), metadata=ROW)
    assert (sample.tokens, sample.response_length) == ([1, 2, 3, 4, 5, 6, 7], 5)
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert len(sample.rollout_log_probs) == sample.response_length
    assert (sample.reward, sample.status, sample.response) == (1.0, Status.COMPLETED, "4")
    assert sample.weight_versions == ["3"]


async def test_slime_gets_a_sample_for_each_segment(generate):
    samples = await generate(two_segments(stop_reason=StopReason.CONTEXT_FULL), metadata=ROW)
    assert [sum(one.loss_mask) for one in samples] == [3, 1]
    assert {one.rollout_id for one in samples} == {4}
    assert {one.status for one in samples} == {Status.TRUNCATED}
    assert samples[0].tokens == [1, 2, 3, 4]
    assert samples[0].metadata is not samples[1].metadata


async def test_slime_drops_a_group_with_a_rollout_without_a_reward(generate, monkeypatch):
    required, *others = names("slime 2026-08-21", "filter")
    output = make_dataclass("DynamicFilterOutput", [required, *((name, Any, None) for name in others)])
    modules(monkeypatch, "slime.rollout.filter_hub.base_types", DynamicFilterOutput=output)
    (bad,) = await generate(failed(), metadata=ROW)
    assert (bad.status, bad.reward, bad.remove_sample) == (Status.ABORTED, None, True)
    good, zero = SlimeSample(reward=1.0), SlimeSample(reward=0.0)
    assert slime.scored(None, [[good], [bad]]) == output(False, "no_reward")
    assert slime.scored(None, [good, good]) == output(False, "zero_variance")
    assert slime.scored(None, [[good, good], zero]) == output(True, None)


async def test_slimes_router_may_be_silent_once_it_has_answered(monkeypatch, caplog):
    monkeypatch.setattr(slime, "ROUTER_SECONDS", -1.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for addresses of this machine
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    answers = [500, 200, 500]

    def answer(asked: Asked) -> Answer:
        return answers.pop(0), {}, json.dumps({"workers": [{"url": "http://one"}]}).encode()

    with web_server(answer) as address:
        router = slime.Router(f"http://{address}")
        with pytest.raises(httpx.HTTPStatusError):
            await router.ask()
        assert [await router.ask(), await router.ask()] == [["http://one"]] * 2
    assert "500" in caplog.text


async def test_slime_normalizes_each_rollout_once_in_its_group():
    def sample(group: int, number: int, reward: float) -> SlimeSample:
        return SlimeSample(group_index=group, index=number, rollout_id=number, reward=reward)

    samples = [sample(0, 0, 1.0), sample(0, 1, 1.0), sample(0, 1, 1.0), sample(1, 2, 1.0), sample(1, 3, 0.0)]
    args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)
    raw, rewards = slime.normalized(args, samples)
    assert raw == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert rewards == pytest.approx([0.0, 0.0, 0.0, 0.5 / 0.5**0.5, -0.5 / 0.5**0.5], abs=1e-4)
    args.grpo_std_normalization = False
    assert slime.normalized(args, samples)[1] == [0.0, 0.0, 0.0, 0.5, -0.5]
    args.rewards_normalization = False
    assert slime.normalized(args, samples) == (raw, raw)


async def test_slime_evaluates_each_rollout_once_and_makes_up_no_reward(generate, caplog):
    (sample,) = await generate(two_segments(reward=0.5), evaluation=True, metadata=ROW)
    assert (sample.tokens, sample.reward) == ([1, 9, 5], 0.5)
    (nothing,) = await generate(failed(), failed(), failed(), evaluation=True, metadata=ROW)
    assert "sandbox_start_failed" in caplog.text
    assert math.isnan(nothing.reward)
    assert nothing.status is Status.ABORTED  # so slime asks no reward model


# -- SkyRL -----------------------------------------------------------------------


def batch(count: int) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": "?"}]] * count,
        "env_classes": ["service"] * count,
        "env_extras": [ROW] * count,
        "sampling_params": {"temperature": 1.0, "max_generate_length": 32},
        "trajectory_ids": [f"t{number}" for number in range(count)],
        "batch_metadata": None,
    }


async def test_skyrl_gets_one_row_for_each_prompt(monkeypatch):
    modules(monkeypatch, "skyrl.train.generators.base", GeneratorInterface=type("GeneratorInterface", (), {}))
    client = FakeClient(rollout(TWO_TURNS), two_segments(reward=0.5))
    output = await skyrl.generator(submitter=client.submitter(concurrency=1)).generate(batch(2))
    assert parameters(skyrl.BatchGenerator.generate) == names("skyrl 2026-08-21", "hook")
    assert set(output) <= set(names("skyrl 2026-08-21", "fields"))
    assert output["response_ids"] == [[3, 4, 5, 6, 7], [2, 3, 4]]
    assert output["loss_masks"] == [[1, 1, 0, 0, 1], [1, 1, 1]]
    assert output["rewards"] == [1.0, 0.5]
    assert output["rollout_metrics"]["rollouts/left_out"] == 0.5
    assert [len(one) for one in output["rollout_logprobs"]] == [5, 3]
    assert len(output["trajectory_generation_times"]) == 2


async def test_skyrl_step_by_step_gets_each_segment():
    client = FakeClient(two_segments(reward=0.5), rollout(TWO_TURNS))
    output = await skyrl.BatchGenerator(client.submitter(concurrency=1), step_wise=True).generate(batch(2))
    assert output["is_last_step"] == [False, True, True]
    assert output["trajectory_ids"] == ["t0", "t0", "t1"]
    assert output["rewards"] == [[0.0, 0.0, 0.0], [0.5], [0.0, 0.0, 0.0, 0.0, 1.0]]
    first, second, _ = output["trajectory_generation_times"]  # one for each row, as SkyRL's evaluation counts them
    assert first == second


async def test_skyrl_sees_why_a_rollout_has_no_reward():
    client = FakeClient(failed())
    with pytest.raises(NoRewardError, match="sandbox_start_failed"):
        await skyrl.BatchGenerator(client.submitter(retries=0)).generate(batch(1))


# -- AReaL -----------------------------------------------------------------------


def episodes_of(client: FakeClient, **given: Any) -> Any:
    gconfig = SimpleNamespace(temperature=0.9, top_p=1.0, top_k=100, max_new_tokens=77)
    areal.make_workflow_class.cache_clear()
    return areal.Workflow(submitter=client.submitter(retries=0), gconfig=gconfig, **given)


async def test_areal_gets_padded_rows():
    assert parameters(areal.Episodes.arun_episode) == names("areal 1.0.4", "hook")
    columns = areal.padded(samples_of(two_segments()))
    assert list(columns) == names("areal 1.0.4", "keys")
    assert columns["input_ids"] == [[1, 2, 3, 4], [1, 9, 5, 0]]
    assert columns["attention_mask"] == [[True] * 4, [True, True, True, False]]
    assert columns["loss_mask"] == [[0, 1, 1, 1], [0, 0, 1, 0]]
    assert columns["versions"] == [[-1, 3, 3, 3], [-1, -1, 3, -1]]
    assert columns["rewards"] == [1.0, 1.0]


def test_areals_greedy_evaluation_is_greedy():
    gconfig = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=100, max_new_tokens=7, greedy=True, stop=["END"])
    episodes = areal.Episodes(FakeClient().submitter(), gconfig=gconfig)
    sampling = episodes.engines.submitter.request(ROW, episodes.params).sampling
    assert (sampling.temperature, sampling.stop) == (0.0, ["END"])


@pytest.mark.torch
async def test_areal_gets_one_row_for_an_episode_and_no_group_with_a_failure(monkeypatch, caplog):
    modules(monkeypatch, "areal.api.workflow_api", RolloutWorkflow=type("RolloutWorkflow", (), {}))
    client = FakeClient(two_segments(), two_segments(), failed())
    episodes = episodes_of(client)
    for _ in range(2):
        rows = await episodes.arun_episode(None, ROW)
        assert rows["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert (episodes.left_out, len(caplog.records)) == (2, 1)
    assert 'segments="all"' in caplog.text
    with pytest.raises(NoRewardError):  # None would shorten the group, and shift the blocks of all after it
        await episodes.arun_episode(None, ROW)
    request = client.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k, request.limits.max_tokens) == (0.9, 100, 77)
    rows = await episodes_of(FakeClient(two_segments()), segments="all").arun_episode(None, ROW)
    assert rows["rewards"].tolist() == [1.0, 1.0]


# -- OpenRLHF --------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "label"), [(ROW, None), ("What is 2+2?", ROW)])
async def test_openrlhf_gets_its_response(monkeypatch, prompt, label):
    modules(monkeypatch, "openrlhf.utils.agent", AgentExecutorBase=type("AgentExecutorBase", (), {}))
    executor = openrlhf.agent_executor(FakeClient(rollout(TWO_TURNS)).submitter())()
    assert parameters(openrlhf.Executor.execute) == names("openrlhf 0.11.2", "hook")
    given = {
        "prompt": prompt,
        "label": label,
        "sampling_params": SimpleNamespace(temperature=1.0, max_tokens=None),
    }
    response = await executor.execute(**given, max_length=6, hf_tokenizer=None, llm_engine=None)
    assert set(response) == set(names("openrlhf 0.11.2", "fields"))
    assert response["observation_tokens"] == [1, 2, 3, 4, 5, 6]
    assert response["action_ranges"] == [(2, 4)]
    assert response["rollout_log_probs"] == [0.0, 0.0, -0.3, -0.4, 0.0, 0.0]
    assert (response["reward"], response["extra_logs"]["left_out"]) == (1.0, 1)


def test_openrlhf_gets_a_row_that_has_room_or_none():
    longest = segment([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1])
    response = openrlhf.response(rollout(longest, segment([1, 9], [0, 1], parent=0)), max_length=4)
    assert (response["observation_tokens"], response["action_ranges"]) == ([1, 9], [(1, 2)])
    assert response["extra_logs"]["left_out"] == 2
    with pytest.raises(RowTooLongError, match=r"4 tokens and more.*max_length \(4\)") as caught:
        openrlhf.response(rollout(longest), max_length=4)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as between Ray's actors


def test_ranges_of_turns_that_follow_each_other():
    assert openrlhf._ranges([1, 1, 0, 1], 10) == [(10, 12), (13, 14)]
    assert openrlhf._ranges([0], 3) == []


# -- NeMo Gym and NeMo-RL --------------------------------------------------------


class Agent:
    """Serves `run` over HTTP, as NeMo Gym's `SimpleResponsesAPIAgent` does."""

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        app.post("/run")(self.run)
        return app


def message_log(answer: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return the new part of each prompt and each generation, as NeMo-RL reads them from an answer."""
    log: list[tuple[str, list[int]]] = []
    seen: list[int] = []
    for item in answer["response"]["output"]:
        prompt, generation, logprobs = (item[name] for name in names("nemo-gym 2026-08-22", "item"))
        assert prompt[: len(seen)] == seen
        assert len(generation) == len(logprobs) > 0
        log += [("user", prompt[len(seen) :]), ("assistant", generation)]
        seen = prompt + generation
    return log


def test_nemo_gym_serves_rollouts_that_nemo_rl_can_read(monkeypatch):
    class Request(BaseModel):
        responses_create_params: dict[str, Any]

    class Response(Request):
        response: dict[str, Any]
        reward: float

    bases = {"BaseRunRequest": Request, "BaseVerifyResponse": Response}
    modules(monkeypatch, "nemo_gym.base_resources_server", **bases)
    agent = {"BaseResponsesAPIAgentConfig": object, "SimpleResponsesAPIAgent": Agent}
    module = ModuleType("nemo_gym.base_responses_api_agent")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(agent)

    client = FakeClient(rollout(TWO_TURNS))
    app = nemo_gym.agent_class(client.submitter())().setup_webserver()
    body = {"responses_create_params": {"input": [], "temperature": 0.8, "max_output_tokens": 50}} | ROW
    answer = TestClient(app).post("/run", json=body).json()
    assert set(names("nemo-gym 2026-08-22", "answer")) <= set(answer)
    assert answer["reward"] == 1.0
    assert message_log(answer) == [
        ("user", [1, 2]),
        ("assistant", [3, 4]),
        ("user", [5, 6]),
        ("assistant", [7]),
    ]
    (request,) = client.requests
    assert (request.task, request.sampling.temperature, request.limits.max_tokens) == (TASK, 0.8, 50)
    refused = TestClient(app).post("/run", json={"responses_create_params": {"input": []}})
    assert (refused.status_code, "environment" in refused.text) == (422, True)


def test_nemo_gym_gets_calls_as_items_and_malformed_ones_as_text():
    one = rollout(segment([1, 2], [0, 1]))
    (item,) = nemo_gym.verified(one, {})["response"]["output"]
    assert item["content"][0]["text"] == "4"
    calls = [
        ToolCall(id="call-0-0", name="python", arguments={"code": "1"}, raw="<tool_call>made</tool_call>"),
        ToolCall(id="call-0-1", name=None, arguments=None, raw="{", error="invalid_json"),
    ]
    said = Message(role="assistant", content="So: ", tool_calls=calls)
    called = one.trajectory.model_copy(update={"messages": [said]})
    call, item = nemo_gym.verified(one.model_copy(update={"trajectory": called}), {})["response"]["output"]
    assert (call["type"], call["call_id"], call["arguments"]) == (
        "function_call",
        "call-0-0",
        '{"code": "1"}',
    )
    assert item["content"][0]["text"] == "So: <tool_call>{</tool_call>"
    assert "generation_token_ids" not in call
    reasons = [FinishReason.STOP] * 2  # two turns, of which the conversation at its end has one
    compacted = one.trajectory.model_copy(update={"finish_reasons": reasons})
    assert nemo_gym.messages_of(one.model_copy(update={"trajectory": compacted})) == []


def test_nemo_gym_gets_a_row_that_nemo_rl_finds_in_its_group():
    summary = segment([1, 8, 9, 9, 9], [0, 0, 1, 1, 1], parent=0)
    answer = nemo_gym.verified(rollout(segment([1, 2, 3], [0, 0, 1]), summary), {})
    (item,) = answer["response"]["output"]
    assert (item["prompt_token_ids"], item["generation_token_ids"], answer["left_out"]) == ([1, 2], [3], 3)


def test_nemo_gym_has_no_answer_without_a_reward():
    client = FakeClient(failed())
    with pytest.raises(NoRewardError):
        asyncio.run(nemo_gym.run(client.submitter(retries=0), ROW))
