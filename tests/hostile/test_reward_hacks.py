"""No shipped reward hack is rewarded, in the built-in environments or in any kind of declarative one."""

import json
import shutil
import subprocess

import pytest

from api_schemas.rollouts import StopReason
from rollout_service.authoring.attacks import SCRIPTS, Attack, AttackVerdict, attack_environment
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.cli.env.new import make_environment
from rollout_service.environments.builtin import calc
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.builtin.code.problems import problems
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.declarative.from_image import extract_environment
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes.host.facts import find_apptainer
from sandboxes.images.squashfs import unpack
from sandboxes.images.store import ImageStore
from sandboxes.runtime.execution import STALL_SECONDS

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(900), pytest.mark.slow(seconds=140)]
LONG = pytest.mark.extended("rollout_service/authoring/attacks/", "rollout_service/environments/", "sandboxes/")
NAMES = {script.name for script in SCRIPTS}
PATIENCE_SECONDS = 25.0
"""Upper bound on a sandbox's start and an attack, which take a second or two on an idle host."""
AT_ONCE = 6
"""Number of attacks at once: more than there are processors, since some only wait."""
SOLUTION = "wc -w <text.txt >answer.txt"


def declarative(folder, sandbox="fresh"):
    made = make_environment("words", folder)
    if sandbox == "same":
        table = made / "environment.toml"
        text = table.read_text().replace('artifacts = ["/workspace"]', 'sandbox = "same"')
        # Programs that never end use all of this time.
        table.write_text(text.replace("[limits]", "[limits]\nevaluate_seconds = 40"))
    return load_folder(made)


def in_image(folder):
    """Load the same environment from an image that is a folder with a root file system."""
    made = make_environment("words", folder)
    tree = folder / "tree"
    unpack(find_apptainer(), ImageStore().resolve("base"), tree)
    if (tree / "environment").is_dir() and not (tree / "environment").is_symlink():
        shutil.rmtree(tree / "environment")
    (tree / "environment").unlink(missing_ok=True)
    shutil.copytree(made, tree / "environment")
    subprocess.run(["chown", "-R", "nobody:nogroup", tree], check=True)
    for path in (tree, *tree.parents):
        if path.stat().st_uid == 0 and str(path).startswith("/tmp/"):
            path.chmod(0o755)
    return load_folder(extract_environment(tree, folder / "cache"), image=tree)


def program(kind):
    index = next(number for number, task in enumerate(code.environment.dataset()) if task["kind"] == kind)
    task = code.environment.dataset()[index]
    # A program that never ends uses up each test's time limit; two tests show whether one meets the next.
    return task | {"time_limit": 2.0, "tests": task["tests"][:2]}, problems()[index].program


def bash(command):
    return turn("", call("bash", command=command))


async def attacked(environment, sandboxes, instance=None):
    report = await attack_environment(environment, sandboxes, instance=instance, max_concurrent=AT_ONCE)
    broken = [outcome for outcome in report.outcomes if outcome.verdict in (AttackVerdict.FORGED, AttackVerdict.NULLED)]
    assert broken == []
    assert {outcome.attack for outcome in report.outcomes} == NAMES
    return report


def test_there_are_enough_of_them_and_each_says_what_it_does():
    assert len(NAMES) == len(SCRIPTS) >= 25
    assert all(script.does and (script.script or script.answer) for script in SCRIPTS)


async def test_calc(sandboxes):
    task = calc.environment.dataset()[0]
    report = await attacked(calc.environment, sandboxes)
    assert report.as_dict()["counts"]["held"] == len(SCRIPTS)
    right = ScriptedPolicy([rf"\boxed{{{task['answer']}}}"])
    assert (await play(calc.environment, task, right, sandboxes)).score.reward == 1.0


@LONG
@pytest.mark.parametrize("kind", ["stdio", "assert"])
async def test_code(sandboxes, kind):
    task, right = program(kind)
    report = await attacked(code.environment, sandboxes, task)
    assert report.as_dict()["counts"]["held"] == len(SCRIPTS)
    submit = turn("", call("write", path="/workspace/solution.py", content=right))
    assert (await play(code.environment, task, ScriptedPolicy([submit, "."]), sandboxes)).score.reward == 1.0


@LONG
@pytest.mark.parametrize("kind", ["fresh", "image"])
async def test_a_declarative_one(tmp_path, sandboxes, kind):
    environment = declarative(tmp_path) if kind == "fresh" else in_image(tmp_path)
    report = await attacked(environment, sandboxes)
    assert report.as_dict()["counts"]["held"] == len(SCRIPTS)
    await solves(environment, sandboxes)


@LONG
async def test_a_declarative_one_in_the_agents_own_sandbox(tmp_path, sandboxes):
    environment = declarative(tmp_path, "same")
    report = await attacked(environment, sandboxes)
    counts = report.as_dict()["counts"]
    assert 0 < counts["not promised"] <= sum(script.changes_programs for script in SCRIPTS)
    [sleeping] = [outcome for outcome in report.outcomes if outcome.attack == "sleeping-programs"]
    assert sleeping.detail.startswith("file_stalled: ")
    assert sleeping.seconds < STALL_SECONDS + PATIENCE_SECONDS
    await solves(environment, sandboxes)


async def solves(environment, sandboxes):
    policy = ScriptedPolicy([bash(SOLUTION), turn("", call("finish", answer="done"))])
    trial = await play(environment, environment.dataset()[0], policy, sandboxes)
    assert (trial.score.reward, trial.stop_reason) == (1.0, StopReason.FINISHED)


async def test_a_forgeable_grader_is_detected(tmp_path, sandboxes):
    made = make_environment("words", tmp_path)
    (made / "grade.py").write_text("import os, subprocess\nsubprocess.run(['bash', 'solution'], cwd='/workspace')\n")
    (made / "environment.toml").write_text(
        (made / "environment.toml")
        .read_text()
        .replace(
            "python3 /environment/grade.py",
            "echo '{\\\"reward\\\": 0}' >$ROLLOUT_RESULT; bash /workspace/solution; true",
        )
    )
    environment = load_folder(made)
    scripts = [
        Attack("forges", "writes the result", 'echo "$FORGE" >solution'),
        Attack("fails", "removes the result", "echo 'rm -f \"$ROLLOUT_RESULT\"' >solution"),
        Attack("nothing", "does nothing", ":"),
    ]
    report = await attack_environment(environment, sandboxes, attacks=scripts)
    assert [outcome.verdict for outcome in report.outcomes] == [
        AttackVerdict.FORGED,
        AttackVerdict.NULLED,
        AttackVerdict.HELD,
    ]
    assert "left no result" in report.outcomes[1].detail
    assert report.broken == 2
    assert json.loads(json.dumps(report.as_dict()))["counts"]["forged"] == 1


async def test_an_environment_whose_grader_always_fails_is_refused(tmp_path, sandboxes):
    made = make_environment("words", tmp_path)
    (made / "grade.py").write_text("raise SystemExit('broken')")
    with pytest.raises(EnvironmentFailedError, match=r"not even an idle agent gets a reward.*broken"):
        await attack_environment(load_folder(made), sandboxes)
