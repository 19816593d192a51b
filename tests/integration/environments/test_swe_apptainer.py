"""Repairs of real packages in sandboxes: honest agents are scored as swebench scores, hostile ones gain nothing."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from api_schemas.rollouts import StopReason
from benchmarks.support.swe_patches import adding, hostile_patches
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.environments.registry import load_path
from rollout_service.environments.swe.environment import PATCH
from rollout_service.environments.swe.grading import SWEBENCH, Precheck, SweEvaluation, judge_log
from rollout_service.environments.swe.repository import apply_patch, go_to_start, make_ready, read_changes
from rollout_service.environments.swe.scripts import END, START, plant_canary
from rollout_service.environments.swe.tasks import read_task
from rollout_service.environments.wrapped import Solving
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.shared_setup import SharedSetups
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import SandboxSpec

pytestmark = [pytest.mark.apptainer, pytest.mark.swe]
FOLDER = Path(__file__).parents[3] / ".cache" / "swe"
"""Made by `ensure_swe` of scripts/lib.sh."""
SECONDS = 120.0


@pytest.fixture(scope="module")
def packages():
    return load_path(FOLDER)


@pytest.fixture(scope="module")
def instances(packages):
    return {instance["repo"].removeprefix("packages/"): instance for instance in packages.dataset()}


@asynccontextmanager
async def sandbox_of(provider, instance):
    async with await provider.start(SandboxSpec(image=instance["image"], network="none")) as sandbox:
        yield sandbox


async def evaluate(provider, instance, patch, precheck=Precheck.CANARY):
    task = read_task(instance)
    async with sandbox_of(provider, instance) as sandbox:
        return await SweEvaluation(task, sandbox, SECONDS).run(patch, precheck)


async def judge_proven(provider, instance, patch):
    """Run the tests, for an empty patch too."""
    async with sandbox_of(provider, instance) as sandbox:
        return await SweEvaluation(read_task(instance), sandbox, SECONDS).judge(patch, Precheck.NOTHING)


def bash(command):
    return turn("", call("bash", command=command))


async def shell(sandbox, command):
    done = await sandbox.exec(["bash", "-c", command], cwd="/testbed")
    assert done.exit_code == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


@pytest.mark.parametrize("package", ["sqlparse", "cachetools"])
async def test_an_agent_that_repairs_gets_the_reward(provider, packages, instances, package):
    instance = instances[package]
    look = bash("cd /testbed && git log --all --oneline | wc -l && ls /tmp && git status --short")
    repair = bash(f"cd /testbed && git apply <<'END'\n{instance['patch']}END\n")
    policy = ScriptedPolicy([look, repair, turn("", call("finish"))])
    played = await play(packages, instance, policy, SandboxSource(provider))
    assert (played.score.reward, played.stop_reason) == (1.0, StopReason.FINISHED)
    assert played.score.parts["canary_failed"] == played.score.parts["pass_to_pass"] == 1.0
    assert "passed" in played.episode.grader_output
    seen = next(message.content for message in policy.messages if message.role == "tool")
    assert seen.split() == ["1"]  # one commit, and nothing of ours in /tmp


async def test_agents_of_a_group_share_the_start_and_nothing_else(provider, packages, instances):
    instance, uses, rewards = instances["cachetools"], [], {}
    setups, source = SharedSetups(count=uses.append), SandboxSource(provider)
    scripts = {
        "repairs": bash(f"cd /testbed && git apply <<'END'\n{instance['patch']}END\n"),
        "breaks": bash("rm -rf /testbed/.git/objects; cd /testbed && rm -r *"),
        "rests": bash("cd /testbed && git status --short && git log --all --oneline | wc -l"),
    }

    async def one(name):
        policy = ScriptedPolicy([scripts[name], turn("", call("finish"))])
        rewards[name] = (await play(packages, instance, policy, source, setups=setups)).score.reward
        if name == "rests":
            assert next(m.content.split() for m in policy.messages if m.role == "tool") == ["1"]

    async with setups.running(), anyio.create_task_group() as tasks:
        for name in scripts:
            tasks.start_soon(one, name)
    assert rewards == {"repairs": 1.0, "breaks": 0.0, "rests": 0.0}
    assert sorted(uses) == [False, True, True]


async def test_an_agent_that_ends_its_sandbox_or_its_repository_gets_none(provider, packages, instances):
    for command in ("kill -9 -1", "rm -rf /testbed/.git/objects"):
        policy = ScriptedPolicy([bash(command), turn("", call("finish"))])
        played = await play(packages, instances["sqlparse"], policy, SandboxSource(provider))
        assert played.score.reward == 0.0
        assert played.episode.state[PATCH] == b""


async def test_no_patch_that_falsifies_the_report_is_rewarded(provider, instances):
    instance = instances["sqlparse"]
    # This repair needs a conftest.py too, so those of the patches are not left out, and only the canary tells.
    lenient = instance | {"patch": instance["patch"] + adding("conftest.py", "").decode()}
    source = "sqlparse/__init__.py"
    async with sandbox_of(provider, instance) as sandbox:
        text = (await sandbox.read_file(f"/testbed/{source}")).decode()
    rewards = {}
    limiter = anyio.CapacityLimiter(2)

    async def grade(name, chosen, patch):
        async with limiter:
            outcome = await evaluate(provider, chosen, patch, Precheck.NOTHING)
            rewards[name, chosen is lenient] = outcome.score.reward

    async with anyio.create_task_group() as tasks:
        for name, patch in hostile_patches(instance, source, text).items():
            tasks.start_soon(grade, name, instance, patch)
            if "conftest" in name:
                tasks.start_soon(grade, name, lenient, patch)
    assert set(rewards.values()) == {0.0}
    assert len(rewards) == 14


async def test_changes_survive_with_their_modes_and_bytes_whatever_git_is_told(provider, instances):
    instance, marker = instances["sqlparse"], "/tmp/ran"
    task = read_task(instance)
    tamper = f"""
    printf '#!/bin/sh\\ntouch {marker}\\ncat\\n' >/tmp/evil; chmod +x /tmp/evil
    for key in core.fsmonitor diff.external filter.x.clean diff.x.textconv; do git config $key /tmp/evil; done
    git config diff.noprefix true; git config core.fileMode false; git config core.hooksPath /tmp
    echo '* filter=x diff=x -text' >.git/info/attributes; echo '*.new' >.git/info/exclude
    rm -f .git/index; cp /tmp/evil .git/hooks/post-index-change
    """
    work = """
    printf '\\000\\377\\001binary' >data.bin; ln -s sqlparse link; chmod +x sqlparse/cli.py
    rm sqlparse/tokens.py; printf 'no newline' >fresh.new; printf 'a\\r\\nb\\n' >mixed.txt
    mkdir -p 'deep/with space'; echo ü >'deep/with space/ü.txt'; git init -q nested; echo x >>sqlparse/utils.py
    """
    listing = r"""
    cd /testbed; rm -rf nested
    find . -path ./.git -prune -o \( -type f -o -type l \) -printf '%m %p %l\n' | sort
    find . -path ./.git -prune -o -type f -print0 | sort -z | xargs -0 sha256sum
    """
    async with sandbox_of(provider, instance) as agent:
        start = await make_ready(agent, task)
        await shell(agent, tamper + work)
        await shell(agent, f"rm -f {marker}")  # the agent's own commands may have run it
        patch, note = await read_changes(agent, task, start)
        assert note == ""
        assert await shell(agent, f"test -e {marker} || echo no") == "no\n"
        wanted = await shell(agent, listing)
    async with sandbox_of(provider, instance) as fresh:
        await go_to_start(fresh, task)
        assert await apply_patch(fresh, task, patch) == ""
        assert await shell(fresh, listing) == wanted


@pytest.mark.parametrize(
    ("leftover", "said"),
    [
        ("head -c 12000000 /dev/urandom >core.1234", "1 of 2 new files, such as core.1234,"),
        (
            "for n in 1 2 3; do head -c 2600000 /dev/urandom >part.$n; done",
            "2 of 4 new files, such as part.3,",
        ),
        (
            "mkdir out; head -c 12000000 /dev/urandom | split -a 3 -b 6000 - out/",
            "of 2001 new files, such as out/",
        ),
    ],
)
async def test_leftovers_of_an_agent_do_not_undo_its_repair(provider, packages, instances, leftover, said):
    instance = instances["cachetools"]
    repair = bash(f"cd /testbed && git apply <<'END'\n{instance['patch']}END\necho more >new.txt; {leftover}")
    policy = ScriptedPolicy([repair, turn("", call("finish"))])
    played = await play(packages, instance, policy, SandboxSource(provider))
    assert played.score.reward == 1.0
    assert any(note.startswith("left out: ") and said in note for note in played.episode.notes)
    assert b"b/new.txt" in played.episode.state[PATCH]


async def test_changes_of_the_repositorys_own_files_are_whole_or_none(provider, packages, instances):
    grow = bash("cd /testbed && head -c 12000000 /dev/urandom >>src/cachetools/keys.py; echo x >new.txt")
    policy = ScriptedPolicy([grow, turn("", call("finish"))])
    played = await play(packages, instances["cachetools"], policy, SandboxSource(provider))
    assert (played.score.reward, played.episode.state[PATCH]) == (0.0, b"")
    assert played.episode.notes == ["the changes are longer than 8388608 bytes, and count as none"]


async def test_the_agent_finds_no_later_commit(provider, instances):
    task = read_task(instances["sqlparse"])
    later = """
    git config user.name n; git config user.email e; git config gc.auto 0
    echo repair >repair.txt; git add repair.txt; git commit -qm repair; git tag v2; git branch other
    git update-ref refs/remotes/origin/main HEAD; git remote add origin https://example.com/x
    later=$(git rev-parse HEAD); blob=$(git rev-parse HEAD:repair.txt)
    git reset -q --hard HEAD~1; echo y >>README; git add -A; git stash -q; git pack-refs --all; git gc -q
    echo local >untracked.txt; echo $later $blob
    """
    async with sandbox_of(provider, instances["sqlparse"]) as sandbox:
        commit, blob = (await shell(sandbox, later)).split()
        await make_ready(sandbox, task)
        for found in (commit, blob):
            assert (await sandbox.exec(["git", "cat-file", "-e", found], cwd="/testbed")).exit_code != 0
        assert await shell(sandbox, "git branch --all; git tag; git remote; git stash list") == "* task\n"
        assert (
            await shell(sandbox, "git reflog; cat untracked.txt; git rev-parse HEAD") == f"local\n{task.base_commit}\n"
        )


async def clean_listing(provider, instances):
    async with sandbox_of(provider, instances["sqlparse"]) as sandbox:
        return await shell(sandbox, "git rev-parse HEAD; ls")


async def test_a_repository_that_stands_at_a_later_commit_goes_back(provider, instances):
    task = read_task(instances["sqlparse"])
    async with sandbox_of(provider, instances["sqlparse"]) as sandbox:
        name = "git -c user.name=n -c user.email=e commit --allow-empty -qm"
        await shell(sandbox, f"echo repair >repair.txt; git add -A; {name} one; {name} two")
        await make_ready(sandbox, task)
        assert await shell(sandbox, "git rev-parse HEAD; ls") == await clean_listing(provider, instances)


@pytest.mark.parametrize(
    "broken",
    [
        {"test_cmd": "python3 -m no_such_runner pytest"},
        {"test_cmd": "no-such-program pytest"},
        {"repo_folder": "/nowhere"},
        {"base_commit": "0" * 40},
    ],
)
async def test_tests_that_never_run_are_a_failure_and_no_zero(provider, instances, broken):
    instance = instances["sqlparse"] | broken
    with pytest.raises(EnvironmentFailedError) as caught:
        await evaluate(provider, instance, instance["patch"].encode())
    assert caught.value.hint


async def test_tests_that_do_not_end_are_a_failure_and_no_zero(provider, instances):
    instance = instances["sqlparse"]
    task = read_task(instance | {"test_cmd": f"sleep 600; {instance['test_cmd']}"})
    async with sandbox_of(provider, instance) as sandbox:
        with pytest.raises(EnvironmentFailedError, match="did not end within 2 s") as caught:
            await SweEvaluation(task, sandbox, 2.0).run(instance["patch"].encode(), Precheck.NOTHING)
    assert "evaluate_seconds" in caught.value.hint


async def test_an_unknown_parser_names_the_nearest(provider, instances):
    with pytest.raises(ConfigurationError, match="parse_log_pytest"):
        await judge_proven(provider, instances["sqlparse"] | {"log_parser": "parse_log_pytes"}, b"")


async def test_a_bug_as_a_patch_is_undone_by_its_reverse(provider, instances):
    """A task in the form of SWE-smith, made from the other end: the bug is the reverse of the repair."""
    old = instances["sqlparse"]
    tests = [test for test in old["PASS_TO_PASS"] if "tests/test_format.py" in test]
    bug = (
        "diff --git a/sqlparse/utils.py b/sqlparse/utils.py\n--- a/sqlparse/utils.py\n+++ b/sqlparse/utils.py\n"
        "@@ -1,3 +1,5 @@\n"
    )
    async with sandbox_of(provider, old) as sandbox:
        head = (await sandbox.read_file("/testbed/sqlparse/utils.py")).decode().splitlines(keepends=True)[:3]
    bug += "+raise ImportError('a bug')\n+\n" + "".join(f" {line}" for line in head)
    instance = {
        "instance_id": "made__up.12345678.x",
        "repo": "swesmith/made__up.12345678",
        "problem_statement": "It cannot be imported.",
        "patch": bug,
        "image": old["image"],
        "test_cmd": "python3 -m pytest --color=no --tb=no -rA",
        "FAIL_TO_PASS": tests,
        "PASS_TO_PASS": [],
    }
    task = read_task(instance)
    async with sandbox_of(provider, instance) as sandbox:
        start = await make_ready(sandbox, task)
        # Neither a difference nor an earlier commit tells the bug.
        assert await shell(sandbox, "git status --short; git rev-list --all --count; git stash list") == "1\n"
        assert await shell(sandbox, "git grep -c 'a bug' HEAD -- sqlparse") == "HEAD:sqlparse/utils.py:1\n"
        assert await apply_patch(sandbox, task, task.gold, reverse=True) == ""
        patch, _ = await read_changes(sandbox, task, start)
    assert b"-raise ImportError" in patch
    outcome = await judge_proven(provider, instance, patch)
    assert outcome.score.reward == 1.0
    outcome = await judge_proven(provider, instance, b"")
    assert (outcome.score.reward, outcome.score.parts["fail_to_pass"]) == (0.0, 0.0)


REFERENCE = """
import importlib.util, json, pathlib, sys, tempfile, types
harness = types.ModuleType("swebench.harness")
harness.__path__ = [str(pathlib.Path(importlib.util.find_spec("swebench").origin).parent / "harness")]
sys.modules["swebench.harness"] = harness
from swebench.harness.grading import get_eval_report
from swebench.types import TestSpec
for line in sys.stdin:
    instance, log = json.loads(line)
    spec = TestSpec(instance["instance_id"], "", [], instance["repo"], instance["version"], instance["FAIL_TO_PASS"],
                    instance["PASS_TO_PASS"], instance["log_parser"], "pass_and_fail")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(log); file.flush()
        prediction = {"instance_id": spec.instance_id, "model_patch": "p", "model_name_or_path": "m"}
        print(json.dumps(get_eval_report(spec, prediction, file.name, True)[spec.instance_id]["resolved"]))
"""


async def test_the_solution_is_checked_with_tests_that_fail_without_it(provider, packages, instances):
    instance, source = instances["sqlparse"], SandboxSource(provider)
    played = await play(Solving(packages), instance, ScriptedPolicy([]), source)
    assert played.score.reward == 1.0
    easy = instance | {"FAIL_TO_PASS": instance["PASS_TO_PASS"][:1]}
    with pytest.raises(EnvironmentFailedError, match="without any change"):
        await play(Solving(packages), easy, ScriptedPolicy([]), source)


@pytest.mark.parametrize(
    ("parser", "command", "log"),
    [
        (
            "parse_log_django",
            "./tests/runtests.py admin",
            "test_{0} (case_{0}.tests.Tests) ... FAIL\ntest_a (admin.T) ... ok\n",
        ),
        (
            "parse_log_django",
            "./tests/runtests.py admin",
            "test_{0} (case_{0}.tests.Tests.test_{0}) ... FAIL\n",
        ),
        ("parse_log_sympy", "bin/test -C --verbose a/tests/test_a.py", "test_a ok\ntest_{0} F\n"),
        ("parse_log_pytest_v2", "pytest -rA", "FAILED tests/test_{0}.py::test_{0} - assert 1 == 2\n"),
    ],
)
async def test_the_parsers_of_other_runners_find_the_canary(instances, parser, command, log):
    task = read_task(instances["sqlparse"] | {"log_parser": parser})
    planted = plant_canary(f": '{START}'\n{command}\n: '{END}'\n", task.tests, task.folder)
    verdict = await judge_log(task, f"{START}\n{log.format(planted.canary)}{END}\n", planted.canary)
    assert planted.status(verdict.statuses) == "FAILED"


async def test_new_files_of_the_tests_are_no_obstacle_after_the_proof(provider, instances):
    added = adding("tests/test_added.py", "def test_added():\n    assert True\n").decode()
    old = instances["sqlparse"]
    instance = old | {
        "test_patch": old["test_patch"] + added,
        "PASS_TO_PASS": [*old["PASS_TO_PASS"], "tests/test_added.py::test_added"],
    }
    outcome = await evaluate(provider, instance, instance["patch"].encode())
    assert (outcome.score.reward, outcome.is_proven) == (1.0, True)


async def test_verdicts_are_those_of_swebench_on_the_same_logs(provider, instances):
    cases = []
    for instance in instances.values():
        for patch in (instance["patch"].encode(errors="surrogateescape"), b""):
            outcome = await judge_proven(provider, instance, patch)
            passed, broken = "\nPASSED ", "\nSKIPPED "
            logs = [outcome.log, outcome.log.replace(passed, broken, 3), outcome.log[: len(outcome.log) // 2]]
            cases += [(instance, log) for log in [*logs, "", outcome.log.replace("FAILED", "XFAIL")]]
    ours = [(await judge_log(read_task(instance), log)).resolved for instance, log in cases]
    lines = "\n".join(json.dumps(case) for case in cases)
    done = await anyio.run_process([str(SWEBENCH.python()), "-I", "-c", REFERENCE], input=lines.encode())
    assert ours == [json.loads(line) for line in done.stdout.splitlines()]
    assert set(ours) == {True, False}
