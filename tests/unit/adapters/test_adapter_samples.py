"""The parts shared by all adapters keep rows aligned, name bad rows, block anywhere, and push weights in order."""

import asyncio
import gc
import json
import pickle
import subprocess
import sys

import pytest

from api_schemas.errors import Problem
from api_schemas.inference import BackendOutcome, PoolOutcome
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.trees import AgentNode, NodeParent, NodePrompt, Work
from api_schemas.tasks import Task
from api_schemas.trajectories import Trajectory
from rollout_client.adapters import submit
from rollout_client.adapters.samples import only_largest, samples_of
from rollout_client.adapters.submit import (
    NoRewardError,
    RolloutSubmitter,
    TaskRowError,
    parse_task,
    read_sampling,
    task_text,
)
from rollout_client.adapters.trl import WeightsFolder
from rollout_client.errors import WeightsError
from tests.support.adapters.rollouts import FakeClient, rollout, segment

pytestmark = pytest.mark.anyio

ADAPTERS = ["trl", "verl", "slime", "skyrl", "areal", "openrlhf", "nemo_gym", "tinker", "verifiers", "swift"]


@pytest.mark.slow
def test_adapters_import_neither_their_trainers_nor_the_server():
    script = (
        "import importlib, sys\n"
        f"for name in {ADAPTERS}:\n"
        "    importlib.import_module(f'rollout_client.adapters.{name}')\n"
        "heavy = ['torch', 'fastapi', 'aiohttp', 'uvicorn', 'transformers', 'ray', 'rollout_service.server']\n"
        f"assert not set(heavy + {ADAPTERS}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_segment_is_split_before_the_first_sampled_token():
    (sample,) = samples_of(rollout(segment([5, 6, 7, 8, 9], [0, 0, 1, 0, 1])))
    assert (sample.prompt_ids, sample.response_ids) == ([5, 6], [7, 8, 9])
    assert sample.response_mask == [1, 0, 1]
    assert sample.logprobs == [-0.7, 0.0, -0.9]
    assert sample.versions == [3, -1, 3]
    assert (sample.reward, sample.sampled, sample.last) == (1.0, 2, True)
    assert sample.token_ids == [5, 6, 7, 8, 9]


def test_every_sampled_token_of_a_rollout_is_in_one_row():
    first = segment([1, 2, 3], [0, 1, 1])
    untouched = segment([1, 2, 3, 4], [0, 0, 0, 0], parent=0)
    last = segment([1, 2, 3, 4, 5], [0, 0, 0, 0, 1], parent=0)
    samples = samples_of(rollout(first, untouched, last))
    assert [(one.segment, one.sampled, one.last) for one in samples] == [(0, 2, False), (2, 1, True)]
    assert only_largest(samples) == samples[:1]
    assert samples[1].prompt_ids == [1, 2, 3, 4]


def test_sub_agents_change_no_row():
    alone = rollout(segment([5, 6, 7, 8, 9], [0, 0, 1, 0, 1]))
    frozen = segment([1, 2, 3, 4], [0, 0, 0, 0]).model_copy(update={"logprobs": [0.0] * 4})
    node = AgentNode(
        node_id="r/1",
        parent=NodeParent(turn=0, call_id="call", wave=0),
        agent="a",
        pool="frozen-1",
        model="m",
        prompt=NodePrompt(system="Look.", user="A"),
        valid=True,
        trajectory=Trajectory(segments=[frozen], messages=[], finish_reasons=[], fork_counts={}),
    )
    led = alone.model_copy(update={"nodes": [node], "work": Work(critical_steps=4)})
    assert samples_of(led) == samples_of(alone)


def test_a_rollout_that_sampled_nothing_has_no_rows():
    assert samples_of(rollout()) == []
    assert samples_of(rollout(trajectory=False)) == []
    assert only_largest([]) == []


def test_a_cut_row_stays_aligned():
    (sample,) = samples_of(rollout(segment([5, 6, 7, 8, 9], [0, 1, 1, 0, 1])))
    assert sample.cut(99) is sample
    cut = sample.cut(2)
    assert (cut.response_ids, cut.response_mask, cut.logprobs, cut.versions) == (
        [6, 7],
        [1, 1],
        [-0.6, -0.7],
        [3, 3],
    )


@pytest.mark.parametrize(
    "row",
    [
        Task(environment="calc", instance={"answer": 4}),
        {"environment": "calc", "instance": {"answer": 4}, "agent_name": "x"},
        {"environment": "calc", "instance": '{"answer": 4}'},
        task_text(Task(environment="calc", instance={"answer": 4})),
        [{"role": "user", "content": task_text(Task(environment="calc", instance={"answer": 4}))}],
    ],
)
def test_every_documented_form_of_a_row_is_read(row):
    assert parse_task(row) == Task(environment="calc", instance={"answer": 4})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("What is 2 + 2?", "task_text"),
        ({"question": "2 + 2"}, "`environment`"),
        ({"environment": "no such name!"}, "`environment`"),
        ({"environment": "calc", "instance": [1]}, "`instance`"),
        ({"environment": "calc", "instance": "{"}, "not a task"),
        ([], "`environment`"),
    ],
)
def test_a_bad_row_is_named_by_its_field(row, says):
    with pytest.raises(TaskRowError, match=says):
        parse_task(row)


def test_sampling_in_the_services_terms():
    sampling = read_sampling({"temperature": 0.7, "top_k": 0, "top_p": None, "stop": "END", "repetition_penalty": 2})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.stop) == (0.7, -1, 1.0, ["END"])


def test_orders_go_to_other_processes():
    submitter = pickle.loads(pickle.dumps(RolloutSubmitter(url="http://node-3:8080", retries=5)))
    assert (submitter.url, submitter.retries) == ("http://node-3:8080", 5)
    request = submitter.request({"environment": "calc"}, max_tokens=9, step=1)
    assert (request.limits.max_tokens, request.metadata, bool(request.rollout_id)) == (9, {"step": 1}, True)


def test_the_address_is_the_command_lines(monkeypatch):
    monkeypatch.setenv("ROLLOUT_URL", "http://elsewhere:1")
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    assert (RolloutSubmitter.from_environment().url, RolloutSubmitter.from_environment(key=None).key) == (
        "http://elsewhere:1",
        None,
    )


async def test_a_rollout_without_a_reward_is_retried_and_then_an_error():
    good, bad = rollout(segment([1, 2], [0, 1])), rollout(reward=None, state=RolloutState.FAILED)
    client = FakeClient(bad, good)
    submitter = client.submitter(retries=2)
    request = submitter.request({"environment": "calc"})
    assert await submitter.run_scored(request) is good
    assert client.ordered == [request.rollout_id, f"{request.rollout_id}.retry-1"]

    client.answers = [bad] * 3
    with pytest.raises(NoRewardError, match=r"sandbox_start_failed.*free some memory") as raised:
        await submitter.run_scored(submitter.request({"environment": "calc"}))
    assert raised.value.rollout is bad
    passed_on = pickle.loads(pickle.dumps(raised.value))  # as between a trainer's processes
    assert (str(passed_on), passed_on.rollout) == (str(raised.value), bad)

    client.answers = [rollout()] * 3
    with pytest.raises(NoRewardError, match="it sampled nothing"):
        await submitter.run_scored(submitter.request({"environment": "calc"}))


async def test_connections_are_kept_for_a_loop_and_closed():
    submitter = RolloutSubmitter(url="http://127.0.0.1:9", patience_seconds=0)
    await submitter.aclose()
    with pytest.raises(Exception, match="no answer"):
        await submitter.run(submitter.request({"environment": "calc"}))
    assert len(submitter._clients) == 1
    await submitter.aclose()
    assert len(submitter._clients) == 0


def test_connections_of_a_loop_that_has_ended_are_given_up(monkeypatch):
    class Connected:
        """Has connections, which hold the event loop that they were opened in."""

        def __init__(self, *_: object, **__: object) -> None:
            self.loop = asyncio.get_running_loop()

        async def run(self, request):
            return request

    monkeypatch.setattr(submit, "RolloutClient", Connected)
    submitter = RolloutSubmitter()
    for _ in range(3):
        asyncio.run(submitter.run(submitter.request({"environment": "calc"})))
        gc.collect()
    assert len(submitter._clients) == 1


def test_orders_block_also_inside_a_running_loop():
    async def main() -> str:
        return RolloutSubmitter().blocking(_address)

    assert asyncio.run(main()) == "http://127.0.0.1:8080"


async def _address(client) -> str:
    return client.base_url


class FakeOrders(RolloutSubmitter):
    """A service with one engine, which refuses weights when told to."""

    served = 41
    refuses = False
    partly = False

    def blocking(self, work):
        return asyncio.run(work(self))

    async def backends(self):
        return [type("Backend", (), {"pool": "policy", "weight_version": self.served})()]

    async def update_weights(self, path, version, *, pool):
        ok = not self.refuses
        type(self).served = version if ok else self.served
        one = BackendOutcome(backend_id="e-1", ok=ok, seconds=0.1, error=None if ok else "no such folder")
        outcome = PoolOutcome(pool=pool, version=version, changed=ok, outcomes=[one])
        if ok and not self.partly:
            return outcome
        context = {"outcome": outcome.model_dump(mode="json")}
        raise WeightsError(Problem(title="no", status=422, detail="no such folder", code="c", context=context))


def test_weights_go_up_from_what_is_served_and_one_folder_stays(tmp_path):
    weights = WeightsFolder(FakeOrders(), tmp_path / "weights")
    saved = []

    def save(folder: str) -> None:
        saved.append(folder)
        (weights.folder / "steps.json").write_text(json.dumps(saved))

    assert weights.push(0, save) == 42
    assert weights.push(3, save) == 45
    assert (weights.step, weights.version) == (3, 45)
    assert not weights.path(0).exists()
    assert weights.path(3).is_dir()
    assert saved == [str(weights.path(0)), str(weights.path(3))]

    weights.submitter.__class__.partly = True
    assert weights.push(4, save) == 46, "the engines that failed are out of service"
    assert weights.push(3, save) == 45
    weights.submitter.__class__.refuses = True
    with pytest.raises(WeightsError, match="no such folder"):
        weights.push(4, save)
    assert (weights.step, weights.path(3).is_dir()) == (3, True)
