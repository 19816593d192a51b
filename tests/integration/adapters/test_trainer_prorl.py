"""A trainer for the ProRL Agent server, which knows only that server's API, gets its rows from a service."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from api_schemas.trajectories import Trajectory
from tests.support.adapters.prorl_trainer import ATTEMPTS, ProrlTrainer, baselines, rows_of
from tests.support.api.server import api_server
from tests.support.processes.service import eventually, scripted_engine
from tests.support.turns import called, turn_of

CODE = "print(2 + 2)"
TURNS = (turn_of(called("python", code=CODE)), r"It is \boxed{4}.<|im_end|>")
ENVIRONMENT = """
name = "graded"
image = "base"
system = "Be brief."
tools = ["python"]
[evaluate]
command = 'grep -q broken "$ROLLOUT_INSTANCE" || echo "{\\"reward\\": 1}" >"$ROLLOUT_RESULT"'
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, str, Path]]:
    """Yield a client of a service, whose grader fails for some instances; the URL of an engine; the service's log."""
    folder = tmp_path_factory.mktemp("prorl")
    (folder / "graded").mkdir()
    (folder / "graded" / "environment.toml").write_text(ENVIRONMENT)
    with (
        scripted_engine(folder, *TURNS) as engine,
        api_server(folder, "--environment", str(folder / "graded")) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client, engine.url, server.log_file


def instance(name: str, **fields: object) -> dict[str, object]:
    """Return an instance as a row of such a trainer's data has it."""
    return {"data_source": "graded", "instance_id": name, "question": f"2 + 2, {name}?", **fields}


def test_a_batch_becomes_rows_of_the_sampled_tokens(started):
    server, engine_url, _ = started
    trainer = ProrlTrainer(server, [engine_url])
    results = trainer.batch([instance("a"), instance("b")], n=2)
    rows = rows_of(results)
    answers = [one for group in results.values() for one in group.values()]
    assert [(one["instance_id"], one["trajectory_id"]) for one in answers] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert trainer.refused == 0
    for answer, row in zip(answers, rows, strict=True):
        path = f"/v1/rollouts/{answer['job_id']}/trajectory"
        (segment,) = Trajectory.model_validate_json(server.get(path).content).segments
        assert row.prompt + row.response == segment.token_ids
        assert [0] * len(row.prompt) + row.loss_mask == segment.loss_mask
        assert [0.0] * len(row.prompt) + row.logprobs == segment.logprobs
        assert (row.resolved, row.error_mask, row.is_padded) == (True, False, False)
        assert [each["role"] for each in answer["messages"]] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        first, last = [each for each in answer["messages"] if each["role"] == "assistant"]
        assert first["tool_calls"] == [{"name": "python", "arguments": json.dumps({"code": CODE})}]
        assert last["input_ids"] == (row.prompt + row.response)[: -len(last["token_ids"])]
        assert answer["messages"][0] | {"token_ids": [], "content": ""} == {
            "role": "system",
            "content": "",
            "token_ids": [],
            "input_ids": None,
            "logprobs": None,
        }
        (tool,) = answer["tools"]
        assert tool["function"]["name"] == "python"
        said = {name: answer[name] for name in ("success", "finish", "end_properly", "resolved", "filter")}
        assert said == {
            "success": True,
            "finish": True,
            "end_properly": True,
            "resolved": True,
            "filter": False,
        }
        assert (answer["error"], answer["critical_error"], answer["git_patch"]) == (None, None, None)
        assert set(answer["timing"]) == {
            *("init_time", "run_time", "eval_time", "others_time"),
            *("counted_elapsed", "timeout_triggered"),
        }


@pytest.mark.parametrize("use_error_mask", [True, False])
def test_a_failure_is_asked_for_again_and_never_trained_on_as_a_zero(started, use_error_mask):
    server, engine_url, _ = started
    trainer = ProrlTrainer(server, [engine_url])
    results = trainer.batch([instance("fine"), instance("broken")], n=2)
    assert trainer.refused == 2 * ATTEMPTS
    rows = rows_of(results)
    assert [row.trained(use_error_mask=use_error_mask) > 0 for row in rows] == [True, True, False, False]
    assert baselines(rows) == {"fine": 1.0, "broken": 1.0}  # no zero stands for a failure
    trainer.call("/start")
    failed = trainer.process(instance("broken")).raise_for_status().json()
    assert (failed["messages"], failed["reward"], failed["resolved"]) == ([], None, False)
    assert (failed["critical_error"], failed["success"], failed["filter"]) == ("eval", False, True)
    assert failed["error"].startswith("Error in eval: ")
    trainer.call("/stop")


def test_an_agent_that_used_up_its_turns_is_an_error_with_a_row(started):
    server, engine_url, _ = started
    results = ProrlTrainer(server, [engine_url], max_iterations=1).batch([instance("short")], n=1)
    answer = results["short"][0]
    assert "Agent reached maximum iteration in headless mode" in answer["error"]
    assert (answer["success"], answer["finish"], answer["critical_error"]) == (False, False, None)
    (row,) = rows_of(results)
    assert (row.error_mask, row.resolved, answer["filter"]) == (True, True, True)
    assert row.trained(use_error_mask=False) == len(row.response)


def test_the_commands_answer_as_that_server_does(started):
    server, engine_url, _ = started
    trainer = ProrlTrainer(server, [f"{engine_url}/v1"])  # the address of its other API, as its documents have it
    trainer.call("/start")
    again = server.post("/start")
    assert (again.status_code, "already running" in again.json()["detail"]) == (400, True)
    status = server.get("/status").raise_for_status().json()
    assert (status.pop("status"), set(status.values())) == ("running", {0})
    assert set(status) == {"pending_jobs", "total"} | {f"{phase}_queue" for phase in ("init", "run", "eval")} | {
        f"active_{phase}" for phase in ("init", "run", "eval")
    }
    assert trainer.call("/stop") == {"status": "Server stopped successfully"}
    refused = [
        server.get("/status"),
        server.post("/stop"),
        server.post("/cancel", json={"job_id": "nobody"}),
        trainer.process(instance("late")),
    ]
    assert [each.status_code for each in refused] == [503] * 4
    bare = engine_url.removeprefix("http://")
    for address in (bare, f"{bare}/v1", f"{engine_url}/v1/"):
        said = trainer.call("/add_llm_server", address=address)
        assert said == {"status": f"Buffered LLM server address: {address}"}
    assert trainer.call("/start") == {"status": "Server started successfully"}
    assert trainer.call("/add_llm_server", address=bare) == {"status": f"Added LLM server address: {bare}"}
    assert [each["url"] for each in server.get("/v1/backends").json()] == [engine_url]
    assert server.post("/process", json={"instance": instance("a"), "sampling_params": 3}).status_code == 422
    trainer.call("/stop")


def test_jobs_are_cancelled_by_name_and_at_a_stop(started):
    server, engine_url, _ = started
    trainer = ProrlTrainer(server, [engine_url])
    trainer.call("/start")
    assert trainer.call("/cancel", job_id="early") == {"status": "Cancel requested for job early"}
    assert trainer.process(instance("x"), "early").json()["resolved"] is True  # nothing was remembered
    trainer.call("/v1/pause", pool="policy")
    with ThreadPoolExecutor(2) as workers:
        jobs = [workers.submit(trainer.process, instance(name), name) for name in ("named", "stopped")]
        eventually(lambda: server.get("/status").json()["active_run"] == 2)
        trainer.call("/cancel", job_id="named")
        assert jobs[0].result().status_code == httpx.codes.INTERNAL_SERVER_ERROR
        assert server.get("/status").json()["pending_jobs"] == 1
        trainer.call("/stop")
        assert server.get("/v1/rollouts/stopped").json()["state"] == "cancelled"  # at once
        assert "cancelled" in jobs[1].result().json()["detail"]
    trainer.call("/v1/resume", pool="policy")
    (answer,) = trainer.batch([instance("after")], n=1)["after"].values()  # it starts again
    assert answer["resolved"] is True


def test_sampling_parameters_without_an_effect_are_logged_once(started):
    server, engine_url, log = started
    trainer = ProrlTrainer(server, [engine_url], repetition_penalty=1.1)
    trainer.batch([instance("odd")], n=2)
    (line,) = [each for each in log.read_text().splitlines() if "repetition_penalty" in each]
    assert "no effect" in line
    assert "custom_tokenizer" not in line
