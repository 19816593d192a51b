"""A branch begins where an earlier rollout was: with its tokens, in a sandbox in the same state, at any model."""

import json
from collections.abc import Iterator

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from api_schemas.trajectories import Trajectory
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine
from rollout_service.tokens import check_invariants
from tests.support.processes.service import Running, service
from tests.support.turns import called, turn_of

pytestmark = pytest.mark.apptainer

MODEL = policy_folder("calc-tuned")
TURNS, BRANCH = 4, 2
TASK = {"environment": "echo", "instance": {"number": 1}}


def scripted(*commands: str) -> ScriptedEngine:
    texts = [turn_of(called("bash", command=command)) for command in commands]
    vocab_size = json.loads((MODEL / "config.json").read_bytes())["vocab_size"]
    return ScriptedEngine(Replies.from_texts(texts, MODEL), vocab_size=vocab_size, model_path=MODEL)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("branches")
    steps = [f"echo step {number} | tee -a steps; wc -l < steps" for number in range(TURNS)]
    stamp = "date +%s%N | tee -a steps"
    look = """printf '{"lines": %d, "first": %d}' "$(wc -l <steps)" "$(head -1 steps)\""""
    others = [*steps[:BRANCH], "cat steps; echo other way", "exit 3"]
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(scripted(*steps)) as engine,
        portal.wrap_async_context_manager(scripted(*others)) as other,
        portal.wrap_async_context_manager(scripted(stamp, stamp, look, "true")) as timed,
        service(folder, engine.url, turns=TURNS, sandbox="apptainer") as running,
    ):
        for pool, engine in (("other", other), ("timed", timed)):
            backend = {"url": engine.url, "pool": pool}
            httpx.post(f"{running.url}/v1/backends", json=backend, timeout=60).raise_for_status()
        submit(running, rollout_id="source").raise_for_status()
        yield running


def submit(running: Running, **fields) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/rollouts", params={"wait": 90}, json={"task": TASK} | fields, timeout=120)


def trajectory(running: Running, name: str) -> Trajectory:
    found = Trajectory.model_validate(running.get(f"/v1/rollouts/{name}/trajectory"))
    check_invariants(found)
    return found


def test_another_model_goes_on_in_a_sandbox_in_the_same_state(running: Running) -> None:
    branch_of = {"rollout_id": "source", "turn": BRANCH}
    submit(running, rollout_id="other", pool="other", branch_of=branch_of).raise_for_status()
    source, branch = trajectory(running, "source"), trajectory(running, "other")
    [segment], [earlier] = branch.segments, source.segments
    begin = earlier.turn_ids.index(BRANCH)
    assert segment.token_ids[:begin] == earlier.token_ids[:begin]
    assert set(segment.turn_ids) == {-1, *range(BRANCH, TURNS)}
    assert sum(segment.loss_mask[:begin]) == 0
    output = branch.messages[2 * BRANCH + 2]
    assert branch.tool_error_turns == [TURNS - 1]
    assert output.role == "tool"
    assert "step 0\nstep 1\nother way" in output.content


TIMED = {"environment": "echo", "instance": {"number": 2}}


def test_tools_that_answer_otherwise_each_time_fail_a_branch_that_does_not_reuse_results(
    running: Running,
) -> None:
    """The sandbox is brought to the same state all the same: the files of the earlier commands are there."""
    submit(running, rollout_id="timed", pool="timed", task=TIMED).raise_for_status()
    point = {"rollout_id": "timed", "turn": BRANCH}
    results = [
        submit(running, rollout_id=f"timed-{reuse}", pool="timed", task=TIMED, branch_of=point | reuse_of)
        .raise_for_status()
        .json()
        for reuse, reuse_of in (("not", {}), ("reused", {"reuse_results": True}))
    ]
    assert results[0]["error"]["code"] == "branch_diverged"
    assert "reuse_results" in results[0]["error"]["hint"]
    assert results[1]["state"] == "completed"
    assert results[1]["branch_of"]["reuse_results"]
    source, branch = trajectory(running, "timed"), trajectory(running, "timed-reused")
    begin = source.segments[0].turn_ids.index(BRANCH)
    assert branch.segments[0].token_ids[:begin] == source.segments[0].token_ids[:begin]
    assert branch.messages[: 2 * BRANCH + 1] == source.messages[: 2 * BRANCH + 1]
    then, now = (json.loads(found.messages[2 * BRANCH + 2].content) for found in (source, branch))
    assert (then["lines"], now["lines"]) == (BRANCH, BRANCH)
    assert then["first"] != now["first"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"branch_of": {"rollout_id": "unknown", "turn": 1}}, "body.branch_of.rollout_id"),
        ({"branch_of": {"rollout_id": "source", "turn": TURNS}}, "body.branch_of.turn"),
        ({"branch_of": {"rollout_id": "source", "turn": 0}}, "body.branch_of.turn"),
        (
            {
                "branch_of": {"rollout_id": "source", "turn": 1},
                "task": {"environment": "echo", "instance": {"number": 2}},
            },
            "body.branch_of.rollout_id",
        ),
        (
            {"branch_of": {"rollout_id": "source", "turn": 1}, "exports": {"top_logprobs": 2}},
            "body.branch_of",
        ),
        ({"branch_of": {"rollout_id": "source", "turn": 1}, "agent": "external"}, "body.branch_of"),
    ],
)
def test_what_cannot_be_a_branch_is_refused_with_the_field(running: Running, fields, path) -> None:
    refused = submit(running, **fields)
    assert refused.status_code == 422, refused.text
    assert path in [error["path"] for error in refused.json()["errors"]]
