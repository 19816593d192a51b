"""In real sandboxes, every template is solved by its solution and its script, and what leaks is found."""

import json

import pytest

from rollout_service.authoring.audit import audit_environment
from rollout_service.cli.env.new import make_environment
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.registry import load_path
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn

pytestmark = pytest.mark.apptainer


@pytest.mark.parametrize("template", ["terminal", "stem", "mcp", "swe", "game"])
async def test_every_template_is_solved_by_its_solution_and_its_script(tmp_path, sandboxes, template):
    folder = make_environment("mine", tmp_path, template)
    environment = load_path(folder)
    report = await audit_environment(environment, sandboxes, list(enumerate(environment.dataset())), runs=1)
    assert report.findings == []
    assert {trial.reward for one in report.instances for trial in one.solved} == {1.0}
    assert {trial.reward for one in report.instances for trial in one.idle} == {0.0}
    lines = map(json.loads, (folder / "solution.jsonl").read_text().splitlines())
    turns = [
        turn(
            line.get("content", ""),
            *(call(one["name"], **one["arguments"]) for one in line.get("tool_calls", [])),
        )
        for line in lines
    ]
    trial = await play(environment, environment.dataset()[0], ScriptedPolicy(turns), sandboxes)
    assert trial.score.reward == 1.0


async def test_the_template_passes_and_a_leak_is_found(tmp_path, sandboxes):
    folder = make_environment("word-count", tmp_path)
    environment = load_folder(folder)
    instances = [(0, environment.dataset()[0] | {"expected": "nine words"})]
    report = await audit_environment(environment, sandboxes, instances, runs=1)
    assert report.findings == []
    assert report.instances[0].solved[0].memory_bytes > 1_000_000
    prepare = folder / "prepare.py"
    prepare.write_text(prepare.read_text() + 'Path("/tmp/debug.log").write_text(str(instance))\n')
    report = await audit_environment(load_folder(folder), sandboxes, instances, runs=1)
    assert report.findings == ["instance 0: leak: /tmp/debug.log holds instance.expected"]
