"""Runs train agents with sub-agents, and read tasks from the folders of their creator."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_client.run_export import RunExport
from rollout_client.sync import SyncRolloutClient
from tests.support.api.server import api_server
from tests.support.processes.service import scripted_engine
from tests.support.turns import called, handed_on, turn_of

ENVIRONMENT = """
name = "survey"
image = "base"
tools = ["finish"]
prompt = "Ask two readers."

[parallel.subagent]
needs_tool_call = false

[evaluate]
command = "python3 /environment/grade.py"
"""
GRADE = """
import json, os, pathlib
pathlib.Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps({"reward": 1.0}))
"""


HAND_ON, ANSWER = handed_on("A", "B"), turn_of(called("finish", answer="both"))
RESULT = "<result>4</result><|im_end|>"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("subagents")
    survey = folder / "survey"
    survey.mkdir()
    (survey / "environment.toml").write_text(ENVIRONMENT)
    (survey / "grade.py").write_text(GRADE)
    with (
        scripted_engine(folder, HAND_ON, ANSWER, name="policy") as policy,
        scripted_engine(folder, RESULT, name="frozen") as frozen,
        api_server(folder, "--environment", str(survey), "--backend", policy.url) as server,
    ):
        command = [sys.executable, "-m", "rollout_service.cli", "backends", "add", frozen.url]
        subprocess.run([*command, "--pool", "frozen-1", "--url", server.url], check=True)
        yield server.url


def order(run_id: str, detail: NodeDetail) -> RunRequest:
    source = InlineTasks(tasks=[Task(environment="survey", instance={"n": 1})])
    return RunRequest(run_id=run_id, source=source, batch_size=1, group_size=2, filters=[], nodes=detail)


@pytest.mark.parametrize("detail", NodeDetail)
async def test_a_run_from_its_request_to_its_export(url, detail, tmp_path):
    async with RolloutClient(url) as client:
        run = await client.create_run(order(f"run-{detail}", detail))
        leased = await run.lease(timeout_seconds=60)
        (group,) = leased.batch.groups
        await run.export(tmp_path / "run.jsonl")
        exported = {one.sample.rollout.rollout_id: one for one in RunExport(tmp_path / "run.jsonl").samples()}
        for sample in group.samples:
            rollout = sample.rollout
            assert (rollout.reward, rollout.error) == (1.0, None)
            assert exported[rollout.rollout_id].sample == sample
            tree = await client.rollout_nodes(rollout.rollout_id)
            assert [(node.prompt.user, node.result, node.valid) for node in tree.nodes] == [
                ("A", "4", True),
                ("B", "4", True),
            ]
            assert (tree.work.critical_steps, tree.work.total_steps, tree.work.width_max) == (3, 4, 2)
            first = await client.rollout_node(rollout.rollout_id, 1)
            if detail is NodeDetail.NONE:
                assert (rollout.nodes, rollout.work, first) == ([], None, tree.nodes[0])
                continue
            assert rollout.work == tree.work
            assert rollout.nodes[0] == first
            assert (first.trajectory is not None) is (detail is NodeDetail.TOKENS)
            if first.trajectory is not None:
                assert first.trajectory.segments
                assert not any(any(segment.loss_mask) for segment in first.trajectory.segments)
        rescored = await run.rescore()
        assert {one.error.code if one.error else None for one in rescored} == {"not_replayable"}


def test_a_run_that_asks_for_no_sub_agents_shows_how_it_uses_them(url):
    with SyncRolloutClient(url) as client:
        run = client.create_run(order("watched", NodeDetail.NONE))
        assert run.lease(timeout_seconds=60) is not None
        deadline = time.monotonic() + 10
        while (parallel := run.view(parallel=True).parallel) is None or parallel.recent is None:
            assert time.monotonic() < deadline, "the manager notes what it has closed a moment later"
            time.sleep(0.01)
        assert run.view().parallel is None
    assert parallel.recent == parallel.total
    figures = parallel.total
    assert (figures.rollouts, figures.perf, figures.assign_rate) == (2, 1.0, 1.0)
    assert (figures.width_max, figures.speedup, figures.delegate_ratio) == (2.0, 4 / 3, 1.0)
    assert (figures.finish_rate, figures.invalid) == (1.0, {})
    metrics = httpx.get(f"{url}/metrics").text
    assert 'rollout_parallel_assigns_total{outcome="valid",run="watched"} 4.0' in metrics
    rows = [line.split() for line in show(url).splitlines()]
    assert ["serial", "critical/total", "0.75", "0.75"] in rows
    (printed,) = json.loads(show(url, "--json"))
    assert printed["parallel"]["recent"]["assign_rate"] == 1.0


def show(url: str, *flags: str) -> str:
    """Return what the command line says of the run."""
    command = [sys.executable, "-m", "rollout_service.cli", "runs", "show", "watched", "--url", url, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
