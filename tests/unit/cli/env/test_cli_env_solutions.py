"""`env check` runs the solutions of a template, and graders in a sandbox of their own."""

import json

import pytest

from rollout_service.cli.env.check import check_environment, with_solutions
from rollout_service.cli.env.engines import PoolModels
from rollout_service.cli.env.shell import GradersSandbox
from rollout_service.cli.env.solutions import PRINTED_LINES, try_tasks
from rollout_service.environments.declarative.environment import load_folder
from sandboxes import SandboxSpec

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path):
    def folder(evaluate: str, solution: str = "true"):
        folder = tmp_path / "env"
        folder.mkdir()
        (folder / "environment.toml").write_text(
            'name = "e"\nimage = "base"\nprompt = "Do it."\n[dataset]\npath = "tasks.jsonl"\n'
            f'[evaluate]\ncommand = {json.dumps(evaluate)}\nsandbox = "same"\n'
            f"[solution]\ncommand = {json.dumps(solution)}\n"
        )
        (folder / "tasks.jsonl").write_text('{"n": 1}\n')
        return folder

    return folder


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def tried(folder, sandboxes):
    [one] = await try_tasks(load_folder(folder), [{"n": 1}], sandboxes, at_once=1)
    return one


async def test_the_end_of_the_graders_output_and_the_processes_left_are_the_reason(make, sandboxes):
    grade = """seq 1 40; echo '{"reward": 0}' > $ROLLOUT_RESULT"""
    solve = """setsid sleep 600 > /dev/null 2>&1 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done"""
    one = await tried(make(grade, solve), sandboxes)
    [problem] = one.problems
    assert problem.startswith("its solution gets 0 (processes of the agent or of init were ended before the grading: ")
    assert "before the grading: sleep 600; `agent_processes` may let them live for" in problem
    assert problem.splitlines()[1:] == [f"  {number}" for number in range(41 - PRINTED_LINES, 41)]


async def test_a_solution_that_leaves_nothing_has_no_such_note(make, sandboxes):
    grade = """echo '{"reward": 0}' > $ROLLOUT_RESULT"""
    one = await tried(make(grade), sandboxes)
    assert one.problems == ("its solution gets 0",)


def test_output_that_repeats_is_shown_once(make, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SANDBOX__PROVIDER", "local")
    folder = str(make("echo all broken; exit 3"))
    report = with_solutions(check_environment(folder), folder, limit=None, at_once=1, good=None, pools=PoolModels())
    found = [finding for finding in report.findings if "solution" in finding or "nothing" in finding]
    assert sum("it printed" in finding or "all broken" in finding for finding in found) == 1
    assert found[-1].endswith("doing nothing gets no reward, for the same reason")


async def test_the_first_program_after_the_files_were_copied_is_told_with_its_variables(provider):
    begun = []

    async def begin(env):
        begun.append(env)

    async with await provider.start(SandboxSpec(image="base")) as own:
        sandbox = GradersSandbox(own, begin)
        await sandbox.exec(["mkdir", "tests"])
        assert begun == []
        await sandbox.write_file("tests/test.sh", "exit 3")
        assert (await sandbox.exec(["bash", "tests/test.sh"], env={"RESULT": "here"})).exit_code == 3
        assert begun == [{"RESULT": "here"}]
        assert sandbox.workdir == own.workdir
