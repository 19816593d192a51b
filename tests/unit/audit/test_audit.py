"""An audit finds what makes a task worthless, and counts no failure as a reward."""

import json
import os
from dataclasses import replace

import pytest

from rollout_service.authoring.audit import Needle, audit_environment, in_prompt, needles
from rollout_service.authoring.audit_report import AuditReport, InstanceAudit, TrialRecord
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.cli.env.audit import show
from rollout_service.cli.env.new import make_environment
from rollout_service.environments.declarative.environment import load_folder

pytestmark = pytest.mark.slow
GRADE = """
import json, os
from pathlib import Path
SECRET
instance = json.loads(Path(os.environ["ROLLOUT_INSTANCE"]).read_text())
left = Path(os.environ["ROLLOUT_WORKDIR"], "left.txt")
given = left.read_text() if left.exists() else Path(os.environ["ROLLOUT_ANSWER"]).read_text()
REWARD
Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps({"reward": float(reward)}))
"""


SECRET = f'secret_of_the_grader = "{"a long line " * 10}"'


@pytest.fixture
def make(tmp_path):
    def folder(*, reward="reward = given == instance['answer']", solution="echo -n forty-two", init="true"):
        folder = tmp_path / "env"
        folder.mkdir(exist_ok=True)
        toml = (
            'name = "e"\nimage = "base"\nprompt = "What is it?"\n'
            f"[init]\ncommand = {json.dumps(init)}\n"
            '[evaluate]\ncommand = "python3 /environment/grade.py"\nsandbox = "same"\n'
        )
        if solution:
            toml += f"[solution]\ncommand = {json.dumps(solution)}\n"
        (folder / "environment.toml").write_text(toml)
        (folder / "grade.py").write_text(GRADE.replace("REWARD", reward).replace("SECRET", SECRET, 1))
        return load_folder(folder)

    return folder


async def audited(environment, sandboxes, runs=1):
    return await audit_environment(environment, sandboxes, [(0, {"answer": "forty-two"})], runs=runs)


async def test_a_good_task_has_no_findings(make, sandboxes):
    report = await audited(make(), sandboxes, runs=2)
    assert report.findings == []
    assert report.good == [0]
    one = report.instances[0]
    assert [trial.reward for trial in one.idle] == [0.0, 0.0]
    assert [trial.reward for trial in one.solved] == [1.0, 1.0]
    assert one.solved[0].evaluate_seconds > 0
    assert one.solved[0].memory_bytes > 0
    assert json.loads(json.dumps(report.as_dict()))["good"] == [0]


async def test_the_template_passes_its_audit(tmp_path, sandboxes):
    text = (folder := make_environment("w", tmp_path)) / "environment.toml"
    text.write_text(text.read_text().replace('artifacts = ["/workspace"]', 'sandbox = "same"'))
    environment = load_folder(folder)
    report = await audit_environment(environment, sandboxes, [(2, environment.dataset()[2])], runs=1)
    assert report.findings == []
    assert report.good == [2]


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"solution": "echo wrong"}, "instance 0: the solution gets 0, and an idle agent 0"),
        ({"reward": "reward = 1"}, "instance 0: the solution gets 1, and an idle agent 1"),
        ({"reward": "reward = 1", "solution": None}, "instance 0: an idle agent gets 1"),
        (
            {"solution": "exit 3"},
            "the solution got no reward in 1 of 1 runs: environment_failed: the solution command",
        ),
        ({"reward": "reward = 1 / 0"}, "an idle agent got no reward in 1 of 1 runs: environment_failed"),
        (
            {"reward": "import secrets; reward = bool(given) + secrets.randbits(60) / 2**60"},
            "instance 0: flaky: an idle agent got the rewards",
        ),
        ({"init": 'cp "$ROLLOUT_INSTANCE" notes.json'}, "notes.json holds instance.answer"),
        ({"init": "cp /environment/grade.py ."}, "leak: "),
    ],
)
async def test_what_is_wrong_is_found(make, sandboxes, options, finding):
    report = await audited(make(**options), sandboxes, runs=2 if "flaky" in finding else 1)
    if finding == "leak: ":  # what [init] names is meant to be seen
        assert report.findings == []
        return
    assert any(finding in found for found in report.findings), report.findings
    assert report.good == []


async def test_rewards_of_another_scale_are_warned_of(make, sandboxes):
    report = await audited(make(reward="reward = 57 if given == instance['answer'] else 0"), sandboxes)
    assert report.findings == []
    [warning] = report.warnings
    assert warning.startswith("instance 0: rewards beyond -1 and 1: 57; ")
    assert report.as_dict()["warnings"] == [warning]
    assert (await audited(make(solution=None), sandboxes)).warnings == [
        "without a solution nothing shows that a task can be solved; add [solution], or in Python `solve`"
    ]


async def test_a_graders_file_that_the_agent_can_read_is_a_leak(make, sandboxes):
    leaving = f"echo '    {SECRET}' >x.py"
    report = await audited(make(init=leaving), sandboxes)
    assert any(found.endswith("x.py holds the grader's file grade.py") for found in report.findings)


async def test_no_instance_is_an_error(make, sandboxes):
    with pytest.raises(EnvironmentFailedError, match="no instance to audit"):
        await audit_environment(make(), sandboxes, [])


def test_texts_are_searched_for_if_they_can_tell():
    instance = {
        "question": "a long enough question",
        "tests": [{"output": "1234567"}, {"output": "12345678"}],
    }
    private = {"grade.py": "short\n" + "x" * 30 + "\n" + "y" * 30, "seen.py": "z" * 30}
    found = needles(instance, private, "the prompt " + "z" * 30)
    assert found[0] == Needle("instance.tests[1].output", "12345678")
    assert {needle.text for needle in found[1:]} == {"x" * 30, "y" * 30}
    assert {needle.what for needle in found[1:]} == {"the grader's file grade.py"}
    assert list(in_prompt(found, "is it 12345678?")) == ["the prompt holds instance.tests[1].output"]


def test_a_pass_rate_leaves_failures_out_and_the_table_shows_it(capsys):
    from rollout_service.cli import common

    one = InstanceAudit(0, idle=[TrialRecord(0.0)], solved=[TrialRecord(2.0)], policy_rewards=[2.0, None, 1.0, 1.9])
    assert one.pass_rate == pytest.approx(1 / 3)
    failed = InstanceAudit(1, idle=[TrialRecord(error="no")], policy_rewards=[None])
    assert failed.pass_rate is None
    report = AuditReport("e", True, "none", 0, 2, (one, failed))
    assert report.findings == [
        "instance 1: an idle agent got no reward in 1 of 1 runs: no",
        "2 connections were refused by the list of hosts",
    ]
    show(report, common.out())
    said = capsys.readouterr().out
    assert "33%" in said
    assert "failed" in said
    assert "e: 1 of 2 instances good" in said
    show(replace(report, has_solution=False), common.out())
    assert "e: 1 of 2 instances without findings" in capsys.readouterr().out


async def test_instances_are_audited_at_once(make, sandboxes, tmp_path):
    met = tmp_path / "met"
    met.mkdir()
    environment = make(init=f'mktemp -p {met}; until [ "$(ls {met} | wc -l)" -ge 2 ]; do sleep 0.01; done')
    instances = [(3, {"answer": "forty-two"}), (4, {"answer": "forty-three"})]
    report = await audit_environment(environment, sandboxes, instances, runs=1, at_once=2)
    assert [(one.index, one.solved[0].reward) for one in report.instances] == [(3, 1.0), (4, 0.0)]
    assert all(one.solved[0].memory_bytes > 0 for one in report.instances)


def test_files_that_an_image_is_built_from_are_not_the_graders(make, tmp_path):
    make()
    image = tmp_path / "env" / "image"
    image.mkdir()
    (image / "Dockerfile").write_text("FROM base\nCOPY data.txt /data.txt\n")
    (image / "data.txt").write_text("what the agent is meant to read\n")
    assert set(load_folder(tmp_path / "env").private_texts()) == {"grade.py"}


@pytest.mark.parametrize(
    ("grep", "finding"),
    [
        (
            "echo 'grep: unrecognized option: I' >&2; exit 1",
            "this image has no GNU grep, so its files were not searched",
        ),
        ('[ "$1" = -rlIF ] || exit 0; sleep 100', "the files were searched for instance.answer for only 0.2 s"),
    ],
)
async def test_files_that_could_not_be_searched_are_not_said_to_be_without_leaks(
    make, sandboxes, tmp_path, monkeypatch, grep, finding
):
    program = tmp_path / "bin" / "grep"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{grep}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("rollout_service.authoring.audit.SEARCH_SECONDS", 0.2)
    report = await audited(make(), sandboxes)
    assert any(finding in found for found in report.findings), report.findings
