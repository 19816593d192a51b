"""A real server, with the embedded engine and local sandboxes, answers valid requests and explains each refusal."""

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api_schemas.environments import EnvironmentView
from api_schemas.errors import Problem
from api_schemas.nodes import NodeView, SandboxView
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.tokens import RolloutMessages
from api_schemas.runs import Run
from api_schemas.trajectories import Trajectory
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.tokens import check_invariants
from sandboxes import make_provider
from sandboxes.config import ApptainerConfig, LocalConfig
from sandboxes.errors import ImageNotFoundError
from tests.support.api.server import api_server


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    variables = {
        "ROLLOUT_SANDBOXES__PRESSURE__ENABLED": "false",  # a busy machine keeps no warm sandboxes
    }
    with (
        api_server(tmp_path_factory.mktemp("service"), engine="embedded", **variables) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def order(api: httpx.Client, *, wait: float = 0, **fields: Any) -> httpx.Response:
    instance = api.get("/v1/environments/calc/dataset", params={"limit": 1}).json()[0]
    body = {"task": {"environment": "calc", "instance": instance}} | fields
    return api.post("/v1/rollouts", json=body, params={"wait": wait})


def problem(response: httpx.Response, status: int) -> Problem:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    parsed = Problem.model_validate_json(response.content)
    assert parsed.status == status
    assert parsed.detail
    return parsed


def test_a_wait_that_is_over_too_soon_answers_with_the_state_of_now(api):
    posted = order(api, wait=2, rollout_id="waits", agent="external")
    read = api.get("/v1/rollouts/waits", params={"wait": 0.1})
    assert (posted.status_code, posted.json()["attempt"], read.json()["attempt"]) == (202, 1, 1)
    assert "queued" not in (posted.json()["state"], read.json()["state"])
    api.delete("/v1/rollouts/waits").raise_for_status()


def test_a_rollout_from_order_to_trajectory(api):
    response = order(api, wait=60, rollout_id="whole", metadata={"mine": 1})
    assert response.status_code == 200
    rollout = Rollout.model_validate_json(response.content)
    assert rollout.state is RolloutState.COMPLETED
    assert rollout.metadata == {"mine": 1}
    assert rollout.reward in (0.0, 1.0)
    assert rollout.usage.turns >= 1
    assert rollout.trajectory is not None
    check_invariants(rollout.trajectory)
    again = Trajectory.model_validate_json(api.get("/v1/rollouts/whole/trajectory").content)
    assert again == rollout.trajectory
    talk = RolloutMessages.model_validate_json(api.get("/v1/rollouts/whole/messages").content)
    assert (talk.messages, talk.finish_reasons) == (again.messages, again.finish_reasons)
    light = Rollout.model_validate_json(api.get("/v1/rollouts/whole").content)
    assert light == rollout.model_copy(update={"trajectory": None})


def test_the_same_order_again_changes_nothing(api):
    first = order(api, rollout_id="twice")
    second = order(api, rollout_id="twice")
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json()["created_at"] == second.json()["created_at"]
    refused = problem(order(api, rollout_id="twice", pool="policy", metadata={"x": 1}), 409)
    assert "twice" in refused.detail


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"task": {"environment": "clac"}}, "body.task.environment"),
        ({"task": {"environment": "calc", "instance": {}}}, "instance"),
        ({"task": {"environment": "calc"}, "smapling": {}}, "body.smapling"),
        ({"task": {"environment": "calc"}, "sampling": {"temperature": -1}}, "body.sampling.temperature"),
        ({"task": {"environment": "calc"}, "limits": {"max_turns": 0}}, "body.limits.max_turns"),
        ({"task": {"environment": "calc"}, "rollout_id": "../etc/passwd"}, "body.rollout_id"),
        ({}, "body.task"),
    ],
)
def test_a_bad_field_is_named(api, body, path):
    before = api.get("/v1/rollouts").json()["counts"]
    refused = problem(api.post("/v1/rollouts", json=body), 422)
    assert any(path in field.path for field in refused.errors), refused.errors
    assert "clac" not in str(body) or "did you mean calc" in refused.detail
    assert sum(api.get("/v1/rollouts").json()["counts"].values()) == sum(before.values())


def test_json_that_cannot_be_stored_is_refused(api):
    headers = {"content-type": "application/json"}
    task = b'{"task": {"environment": "calc", "instance": %s}}'
    for instance in [
        b'{"question": "\\ud800", "answer": "1"}',
        b'{"question": "1", "answer": "1", "x": NaN}',
        *(b'{"question": "1", "answer": "1", "x": %s%s}' % (b"[" * n, b"]" * n) for n in (120, 230, 5_000)),
    ]:
        refused = problem(api.post("/v1/rollouts", content=task % instance, headers=headers), 400)
        assert refused.code == "malformed_json"
        assert [field.path for field in refused.errors] == ["body"]


AUXILIARY = {"lambda1": {"init": 0.3}, "lambda2": {"init": 0.2}, "length": 5}


def looking_at(part: str) -> dict[str, Any]:
    return {"name": "zero_variance", "options": {"part": part}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rollouts", {"sampling": {"seed": 2**64}}, "body.sampling.seed"),
        ("/v1/rollouts", {"sampling": {"top_k": 2**64}}, "body.sampling.top_k"),
        ("/v1/rollouts", {"limits": {"max_tokens": 2**70}}, "body.limits.max_tokens"),
        ("/v1/rollouts", {"limits": {"agent_seconds": 1e300}}, "body.limits.agent_seconds"),
        ("/v1/rollouts", {"sampling": {"temperature": "1"}}, "body.sampling.temperature"),
        ("/v1/rollouts", {"limits": {"max_turns": True}}, "body.limits.max_turns"),
        ("/v1/rollouts", {"sampling": {"stop": ["x", ""]}}, "body.sampling.stop.1"),
        ("/v1/rollouts", {"sampling": {"stop": ["x"] * 17}}, "body.sampling.stop"),
        ("/v1/runs", {"sampling": {"stop": ["x" * 257]}}, "body.sampling.stop.0"),
        ("/v1/runs", {"version": 2**64}, "body.version"),
        ("/v1/runs", {"max_staleness": 2**64}, "body.max_staleness"),
        ("/v1/runs", {"source": {"kind": "inline", "epochs": 2**64}}, "body.source.epochs"),
        ("/v1/runs", {"source": {"kind": "inline", "tasks": [{}]}}, "body.source.tasks.0.environment"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"lambda1": {"init": -1}}}, "body.auxiliary.lambda1.init"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"lambda2": {"init": 1e300}}}, "body.auxiliary.lambda2.init"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"lambda2": None}}, "body.auxiliary"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"length": 0}}, "body.auxiliary.length"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"start": -1}}, "body.auxiliary.start"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"parallel": "depth"}}, "body.auxiliary.parallel"),
        ("/v1/runs", {"auxiliary": AUXILIARY | {"form": "openparl"}}, "body.auxiliary.form"),
        ("/v1/runs", {"advantages": "parts_norm"}, "body"),
        ("/v1/runs", {"filters": [looking_at("speed")]}, "body.filters.0.options.part"),
        ("/v1/runs", {"filters": [looking_at("perf"), looking_at("finish")]}, "body.filters.1.options.part"),
        ("/v1/runs/any/tasks", {"tasks": [], "offset": 2**64}, "body.offset"),
        ("/v1/weights", {"path": "x", "version": 2**64}, "body.version"),
        ("/process", {"instance": {"data_source": "calc"}, "sampling_params": {"top_p": 7}}, "top_p"),
        ("/process", {"instance": {"data_source": 3}}, "body.instance.data_source"),
        ("/add_llm_server", {"address": "http://[::"}, "body.address"),
    ],
)
def test_a_value_out_of_bounds_is_named(api, path, body, field):
    whole = {"task": {"environment": "calc"}} if path == "/v1/rollouts" else {}
    whole |= {"batch_size": 1, "source": {"kind": "inline"}} if path == "/v1/runs" else {}
    refused = problem(api.post(path, json=whole | body), 422)
    assert any(error.path.endswith(field) for error in refused.errors), refused.errors


def test_an_engine_whose_name_no_host_can_have_is_not_reached(api):
    assert problem(api.post("/add_llm_server", json={"address": ".engine"}), 502).code == "backend_unreachable"


def test_values_at_the_bounds_are_taken(api):
    instance = api.get("/v1/environments/calc/dataset", params={"limit": 1}).json()[0]
    bound, tasks = 2**62, [{"environment": "calc", "instance": instance}]
    body = {
        "run_id": "bounds",
        "source": {"kind": "inline", "tasks": tasks, "epochs": bound, "seed": -bound, "shuffle": True},
        "batch_size": 65_536,
        "group_size": 1,
        "version": bound,
        "max_staleness": bound,
        "prefetch_batches": bound,
        "priority": bound,
        "max_concurrent": 1,
        "retention": {"seconds": 1e9, "max_bytes": bound},
        "sampling": {"seed": bound, "top_k": 2**31 - 1},
        "limits": {
            "max_tokens": bound,
            "max_turn_tokens": bound,
            "rollout_seconds": 1e9,
            "init_seconds": 1e9,
        },
    }
    assert api.post("/v1/runs", json=body).status_code == 201
    rollout = api.get("/v1/rollouts/bounds.0.0", params={"wait": 30})
    while rollout.status_code == 404:  # the run manager has not started it yet
        rollout = api.get("/v1/rollouts/bounds.0.0", params={"wait": 30})
    assert rollout.json()["state"] == "completed", rollout.text
    assert api.delete("/v1/runs/bounds").json()["problem"] is None


@pytest.mark.parametrize(
    ("method", "path", "parameter", "near"),
    [
        ("GET", "/v1/rollouts", "limitt", "limit"),
        ("GET", "/v1/rollouts/x", "trajectories", "trajectory"),
        ("POST", "/v1/rollouts", "waits", "wait"),
        ("GET", "/v1/backends", "pool", None),
    ],
)
def test_an_unknown_query_parameter_is_refused(api, method, path, parameter, near):
    refused = problem(api.request(method, path, params={parameter: "1"}), 422)
    assert refused.errors[0].path == f"query.{parameter}"
    suggestion = "" if near is None else f"; did you mean {near}?"
    assert refused.errors[0].message == f"unknown query parameter{suggestion}"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"environment": "clac"}, "environment"),
        ({"environment": "calc", "instance": {"question": "1", "answer": "x"}}, "instance.answer"),
    ],
)
def test_a_wrong_task_of_a_run_is_named_where_it_is(api, body, path):
    right = {"environment": "calc", "instance": {"question": "1 + 1", "answer": "2"}}
    order = {"source": {"kind": "inline", "tasks": [right, body]}, "batch_size": 1}
    assert problem(api.post("/v1/runs", json=order), 422).errors[0].path == f"body.source.tasks.1.{path}"
    api.post("/v1/runs", json={"run_id": "open", "source": {"kind": "inline", "open": True}, "batch_size": 1})
    refused = problem(api.post("/v1/runs/open/tasks", json={"tasks": [right, body]}), 422)
    assert refused.errors[0].path == f"body.tasks.1.{path}"
    assert problem(api.post("/v1/rollouts", json={"task": body}), 422).errors[0].path == f"body.task.{path}"


def test_auxiliary_rewards_are_refused_where_there_are_no_sub_agents(api):
    task = {"environment": "calc", "instance": {"question": "1 + 1", "answer": "2"}}
    order = {"source": {"kind": "inline", "tasks": [task]}, "batch_size": 1, "auxiliary": AUXILIARY}
    refused = problem(api.post("/v1/runs", json=order), 422)
    assert refused.errors[0].path == "body.source.tasks.0.environment"
    assert refused.errors[0].message == "the environment 'calc' has no sub-agents to reward"
    order["source"] = {"kind": "dataset", "environment": "calc", "split": "train"}
    assert problem(api.post("/v1/runs", json=order), 422).errors[0].path == "body.source.environment"
    order |= {"run_id": "aux", "source": {"kind": "inline", "open": True}}
    assert api.post("/v1/runs", json=order).status_code == 201
    refused = problem(api.post("/v1/runs/aux/tasks", json={"tasks": [task]}), 422)
    assert refused.errors[0].path == "body.tasks.0.environment"
    api.delete("/v1/runs/aux")


def test_a_run_shows_what_it_is_warned_of(api):
    order = {"run_id": "warned", "source": {"kind": "inline", "open": True}, "batch_size": 1}
    order |= {"auxiliary": AUXILIARY, "advantages": "group_norm"}
    created = Run.model_validate(api.post("/v1/runs", json=order).json())
    assert [warning.partition(":")[0] for warning in created.warnings] == ["advantages"]
    assert Run.model_validate(api.get("/v1/runs/warned").json()).warnings == created.warnings
    assert api.post("/v1/runs", json=order | {"run_id": "calm", "advantages": "none"}).status_code == 201
    assert "warnings" not in api.get("/v1/runs/calm").json()
    for run_id in ("warned", "calm"):
        api.delete(f"/v1/runs/{run_id}")


@pytest.mark.parametrize("kind", ["fifo", "folder", "nul", "home"])
def test_an_invalid_file_of_tasks_is_refused(api, tmp_path, kind):
    path = tmp_path / "tasks.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "folder":
        path.mkdir()
    named = {"nul": "/tmp/a\0b.jsonl", "home": "~nobody-of-this-name/tasks.jsonl"}.get(kind, str(path))
    order = {"source": {"kind": "file", "path": named, "environment": "calc"}, "batch_size": 1}
    assert problem(api.post("/v1/runs", json=order, timeout=10), 422).errors[0].path == "body.source.path"


def test_an_unknown_pool_says_how_to_register_a_backend(api):
    refused = problem(order(api, pool="judge"), 503)
    assert "/v1/backends" in refused.detail
    assert refused.retryable


def test_a_backend_that_does_not_answer_is_refused(api):
    before = {backend["backend_id"] for backend in api.get("/v1/backends").json()}
    refused = problem(api.post("/v1/backends", json={"url": "http://127.0.0.1:9"}), 502)
    assert "127.0.0.1:9" in refused.detail
    assert {backend["backend_id"] for backend in api.get("/v1/backends").json()} == before


def test_an_unknown_path_and_method(api):
    assert "/v1/rollouts" in problem(api.get("/v1/rollout"), 404).detail
    refused = api.put("/v1/rollouts")
    problem(refused, 405)
    assert refused.headers["allow"] == "GET, POST"
    assert api.put("/v1/backends/http://engine/drain").headers["allow"] == "POST", "an id may have slashes"
    assert api.put("/v1/backends/http://engine").headers["allow"] == "DELETE"
    problem(api.get("/v1/rollouts/nobody"), 404)
    problem(api.get("/v1/rollouts/nobody/trajectory"), 404)
    problem(api.get("/v1/rollouts/nobody/messages"), 404)
    problem(api.delete("/v1/backends/nobody"), 404)
    problem(api.get("/v1/environments/nobody/dataset"), 404)


def test_cancel_before_submit(api):
    assert api.delete("/v1/rollouts/tombstone").status_code == 202
    assert order(api, rollout_id="tombstone", wait=10).json()["state"] == "cancelled"
    assert api.delete("/v1/rollouts/tombstone").json()["was"] == "cancelled"


def test_pages_are_complete_and_in_order(api):
    for i in range(5):
        order(api, rollout_id=f"page-{i}")
    seen, cursor = [], None
    while True:
        page = api.get("/v1/rollouts", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        seen += [rollout["rollout_id"] for rollout in page["rollouts"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert len(seen) == len(set(seen))
    assert [name for name in seen if name.startswith("page-")] == [f"page-{i}" for i in range(5)]


def test_environments_health_and_metrics(api):
    names = {EnvironmentView.model_validate(shown).name for shown in api.get("/v1/environments").json()}
    assert {"calc", "math", "code"} <= names
    assert api.get("/health").json()["status"] == "ok"
    assert api.get("/ready").json() == {"ready": True, "reasons": [], "warnings": []}
    rollout_id = order(api, wait=60).json()["rollout_id"]
    api.get(f"/v1/rollouts/{rollout_id}")
    metrics = api.get("/metrics").text
    assert 'rollout_finished_total{environment="calc",state="completed"' in metrics
    assert "/v1/rollouts/{rollout_id}" in metrics
    assert isinstance(api.get("/v1/sandboxes").json(), list)
    assert api.get("/openapi.json").json()["openapi"].startswith("3.")


def test_a_node_says_what_it_has_and_keeps_a_sandbox_warm(api):
    order(api, wait=60)
    deadline = time.monotonic() + 30
    while True:  # rollouts of tests before may still use sandboxes
        node = NodeView.model_validate(api.get("/v1/nodes").json()[0])
        shown = {SandboxView.model_validate(shown).state for shown in api.get("/v1/sandboxes").json()}
        if node.warm == 1 and "warm" in shown:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert 1 <= node.target <= node.ceiling
    assert node.pressure.memory_available_bytes
    assert (node.breaches, node.egress.connections) == ({}, 0)
    order(api, wait=60)
    metrics = api.get("/metrics").text
    assert "rollout_egress_connections_total 0.0" in metrics
    assert 'rollout_egress_bytes_total{direction="out"} 0.0' in metrics
    assert 'rollout_sandboxes{state="ceiling"}' in metrics
    assert 'rollout_sandbox_acquire_seconds_count{start="warm"}' in metrics


def test_a_trainer_written_for_the_prorl_server(api):
    instance = api.get("/v1/environments/calc/dataset", params={"limit": 1}).json()[0]
    body = {
        "instance": instance | {"data_source": "calc"},
        "sampling_params": {"temperature": 1.0, "max_tokens": 64, "repetition_penalty": 1.0},
        "job_id": "prorl-1",
    }
    answer = api.post("/process", json=body).json()
    assert answer["resolved"] in (True, False)
    assistant = [message for message in answer["messages"] if message["role"] == "assistant"]
    assert assistant
    for message in assistant:
        assert len(message["token_ids"]) == len(message["logprobs"]) > 0
        assert message["input_ids"]
    deadline = time.monotonic() + 30
    while (status := api.get("/status").json())["total"]:  # a rollout of a test before may be ending
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (status["status"], status["pending_jobs"]) == ("running", 0)
    assert "prorl-2" in api.post("/cancel", json={"job_id": "prorl-2"}).json()["status"]
    assert "swebench" in problem(api.post("/process", json={"instance": {}}), 422).detail


def test_stop_and_start(api):
    api.post("/stop")
    problem(api.get("/status"), 503)
    assert api.get("/ready").status_code == 503
    rollout_id = order(api).json()["rollout_id"]
    assert api.get(f"/v1/rollouts/{rollout_id}", params={"wait": 0.3}).json()["state"] == "queued"
    api.post("/start")
    assert api.get(f"/v1/rollouts/{rollout_id}", params={"wait": 60}).json()["state"] == "completed"


async def test_a_missing_image_is_refused_where_sandboxes_need_one(tmp_path):
    spec = EnvironmentSpec(name="lost", image=str(tmp_path / "nowhere.sif"))
    apptainer = make_provider(ApptainerConfig(), tmp_path)
    local = make_provider(LocalConfig(provider="local"), tmp_path)
    with pytest.raises(ImageNotFoundError, match=r"nowhere\.sif"):
        await SandboxSource(apptainer).check(spec)
    await SandboxSource(local).check(spec)
