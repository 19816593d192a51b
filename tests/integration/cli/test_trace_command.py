"""`rollout-service trace` writes runs and rollouts of a running server, whole or not at all."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api_schemas.rollouts import RolloutRequest
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_service.activity import Activity, ActivityBoard, noting, waits_for
from rollout_service.cli import app
from rollout_service.observability.tracing.steps import compress, encode
from rollout_service.store.contract import EncodedSteps
from rollout_service.store.runs_contract import NewGroup
from rollout_service.store.sqlite import SqliteStore
from tests.support.api.server import filled_server

TASK = Task(environment="calc", instance={"question": "1", "answer": "1"})


def attempted(rollout_id: str) -> Activity:
    board = ActivityBoard()
    with board.working(rollout_id, attempt=1, environment="calc") as activity:
        activity.enter_stage(Stage.ROLLOUT)
        with noting(turn=0), waits_for(StepKind.ENGINE, "e1") as step:
            step.note(tokens=3)
        with waits_for(StepKind.TOOL, "bash", command="ls"):
            pass
    return activity


async def fill(path: Path) -> None:
    """Write a store with a run of four rollouts, one of which was tried again, one alone, and one without steps."""
    async with await SqliteStore.open(path) as store:
        run = RunRequest(run_id="run", source=InlineTasks(tasks=[TASK, TASK]), group_size=2, batch_size=2)
        await store.runs.create(run, tasks=2, digest=None, version=0)
        ids = [[f"run.{number}.{sample}" for sample in range(2)] for number in range(2)]
        groups = [
            NewGroup(number, 0, [RolloutRequest(rollout_id=one, task=TASK) for one in of_group])
            for number, of_group in enumerate(ids)
        ]
        await store.runs.start_groups("run", groups)
        await store.runs.retry_sample("run", 0, 1, RolloutRequest(rollout_id="run.0.1.1", task=TASK))
        for name in ("alone", "new"):
            await store.submit(RolloutRequest(rollout_id=name, task=TASK))
        names = [*ids[0], *ids[1], "run.0.1.1", "alone"]
        await store.save_steps([EncodedSteps(name, compress(encode(attempted(name)))) for name in names])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with filled_server(tmp_path_factory.mktemp("traced"), fill) as url:
        yield url


def run(url: str, *arguments: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, ["trace", *arguments, "--url", url])
    assert done.exit_code == exit_code, done.output
    return " ".join(done.output.split())


def rollouts(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events if event["ph"] == "X" and "environment" in event.get("args", {})}


def test_a_run_is_written_with_all_tries(url, tmp_path):
    file = tmp_path / "run.json"
    file.write_text("an earlier one")
    said = run(url, "run", "-o", str(file))
    assert "5 rollouts" in said
    document = json.loads(file.read_bytes())
    assert rollouts(document["traceEvents"]) == {"run.0.0", "run.0.1", "run.0.1.1", "run.1.0", "run.1.1"}
    assert all(event["ts"] > 0 for event in document["traceEvents"] if "ts" in event)
    assert list(tmp_path.iterdir()) == [file]


def test_rollouts_are_written_compressed(url, tmp_path):
    file = tmp_path / "some.json.gz"
    assert "2 rollouts" in run(url, "alone", "run.1.1", "-o", str(file))
    document = json.loads(gzip.decompress(file.read_bytes()))
    assert rollouts(document["traceEvents"]) == {"alone", "run.1.1"}
    turns = [event for event in document["traceEvents"] if event["name"] == "turn 0"]
    assert [event["args"] for event in turns] == [{"tokens": 3}] * 2


@pytest.mark.parametrize(
    ("names", "said"),
    [(["new"], "there are no steps yet"), (["nobody"], "nobody"), (["alone", "nobody"], "nobody")],
)
def test_what_cannot_be_traced_leaves_no_file(url, tmp_path, names, said):
    assert said in run(url, *names, "-o", str(tmp_path / "t.json"), exit_code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(url, tmp_path):
    file = tmp_path / "missing" / "t.json"
    said = run(url, "alone", "-o", str(file), exit_code=1)
    assert "cannot be written" in said
    assert "-o" in said
