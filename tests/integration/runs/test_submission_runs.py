"""Agents' programs are run for the grader, and can neither find nor influence it."""

import json

import pytest

from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn

pytestmark = pytest.mark.apptainer
GRADE = """
import json, os
instance = json.load(open(os.environ["ROLLOUT_INSTANCE"]))
runs = json.load(open(os.environ["ROLLOUT_RUNS"]))
right = [run["stdout"].strip() == expected for run, expected in zip(runs, instance["outputs"], strict=True)]
json.dump({"reward": float(all(right)), "parts": {"right": sum(right)}}, open(os.environ["ROLLOUT_RESULT"], "w"))
"""
INSTANCE = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
HONEST = "print(sum(map(int, input().split())))"
SEARCH = """
import glob, os, subprocess, sys
found = glob.glob("/tmp/.rollout-*") + [name for name in os.environ if name in ("ROLLOUT_INSTANCE", "ROLLOUT_RESULT")]
text = subprocess.run("grep -rs output[s] /tmp /workspace /root /run /dev/shm", shell=True, capture_output=True).stdout
print(found, text)
"""
DAEMON = """
import glob, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for folder in glob.glob("/tmp/.rollout-*") + ["/workspace"]:
                try:
                    open(folder + "/result.json", "w").write('{"reward": 1}')
                except OSError:
                    pass
print(0)
"""
SHELL = """
import os
for name in ("bash", "python3", "sh", "tar"):
    path = "/usr/local/sbin/" + name
    open(path, "w").write('#!/bin/dash\\necho \\'{"reward": 1}\\' >"$ROLLOUT_RESULT"\\n')
    os.chmod(path, 0o755)
print(0)
"""


def environment(folder, sandbox="fresh", run='command = "python3 solution.py"\nstdin = "inputs"\nseconds = 3\n'):
    folder.mkdir(exist_ok=True)
    (folder / "grade.py").write_text(GRADE)
    (folder / "environment.toml").write_text(
        'name = "adder"\nimage = "base"\nprompt = "Add."\ntools = ["write", "finish"]\n'
        f'[evaluate]\ncommand = "python3 /environment/grade.py"\nsandbox = "{sandbox}"\n[evaluate.run]\n{run}'
    )
    return load_folder(folder)


async def scored(env, sandboxes, program, instance=INSTANCE):
    script = [turn("", call("write", path="solution.py", content=program)), turn("", call("finish"))]
    return await play(env, dict(instance), ScriptedPolicy(script), sandboxes)


@pytest.mark.parametrize("sandbox", ["fresh", "same"])
async def test_a_program_is_run_on_every_input_before_the_grader(tmp_path, sandboxes, sandbox):
    env = environment(tmp_path / "e", sandbox)
    assert (await scored(env, sandboxes, HONEST)).score.reward == 1.0
    assert (await scored(env, sandboxes, "print(3)")).score.parts == {"right": 1.0}


@pytest.mark.parametrize("program", [SEARCH, DAEMON, SHELL, "import time; time.sleep(100)", "while True: print('x')"])
async def test_a_program_finds_nothing_of_the_grader_and_changes_nothing_for_it(tmp_path, sandboxes, program):
    trial = await scored(environment(tmp_path / "e"), sandboxes, program)
    assert trial.score.reward == 0.0
    runs = trial.episode.state["runs.json"]
    if program == SEARCH:
        assert [run.stdout for run in runs] == ["[] b''\n"] * 2
    if "sleep" in program:
        assert all(run.timed_out for run in runs)
    if "while True: print" in program:
        assert all(run.truncated and len(run.stdout) <= 65_536 + 200 for run in runs)


async def test_runs_without_time_left_have_timed_out(tmp_path, sandboxes):
    env = environment(tmp_path / "e")
    env.spec = env.spec.model_copy(update={"limits": env.spec.limits.model_copy(update={"evaluate_seconds": 8.0})})
    instance = {"inputs": ["1 2"] * 100, "outputs": ["3"] * 100}
    trial = await scored(env, sandboxes, "import time; time.sleep(100)", instance)
    runs = trial.episode.state["runs.json"]
    assert len(runs) == 100
    assert all(run.timed_out for run in runs)
    assert trial.score.reward == 0.0


@pytest.mark.parametrize("inputs", [None, [], 3, [1], "missing"])
def test_an_instance_without_inputs_is_refused(tmp_path, inputs):
    instance = {} if inputs == "missing" else {"inputs": inputs}
    with pytest.raises(InvalidFieldError, match=r"instance\.inputs"):
        environment(tmp_path / "e").check(instance)


def test_the_program_cannot_see_the_graders_files(tmp_path):
    with pytest.raises(ConfigurationError, match="not there when it runs"):
        environment(tmp_path / "e", run='command = "bash /environment/run.sh"\n')
    assert json.loads(json.dumps(environment(tmp_path / "e").spec.model_dump(mode="json")))["runs_submission"]
