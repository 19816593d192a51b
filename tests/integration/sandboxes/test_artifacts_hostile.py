"""An agent gains no reward by tampering with its sandbox before its files are taken for the grader."""

import os
import signal

import anyio
import pytest

from api_schemas.rollouts import StopReason
from rollout_service.cli.env.new import make_environment
from rollout_service.environments.builtin import calc
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn

pytestmark = pytest.mark.apptainer

SLEEPING = r"""
for name in tar bash stat head cat realpath; do
  printf '#!/bin/sh\nsleep 1000\n' >/usr/local/sbin/$name; chmod 755 /usr/local/sbin/$name
done
"""


@pytest.fixture
def environment(tmp_path):
    return load_folder(make_environment("count", tmp_path))


def bash(command):
    return turn("", call("bash", command=command))


async def scored(environment, sandboxes, *commands):
    script = [*(bash(command) for command in commands), turn("", call("finish", answer="done"))]
    return await play(environment, environment.dataset()[0], ScriptedPolicy(script), sandboxes)


@pytest.mark.parametrize("spoil", ["chmod 000 .", "chmod 000 answer.txt", SLEEPING, "chmod 000 . *; " + SLEEPING])
async def test_unreadable_files_of_the_agent_are_scored_too(environment, sandboxes, spoil):
    solve = "wc -w <text.txt >answer.txt"
    assert (await scored(environment, sandboxes, f"{solve}; {spoil}")).score.reward == 1.0
    assert (await scored(environment, sandboxes, f"echo 0 >answer.txt; {spoil}")).score.reward == 0.0


@pytest.mark.parametrize("leave", ["truncate -s 100G large", "for i in {1..70000}; do : >$i; done"])
async def test_more_than_the_limit_is_an_empty_submission_with_a_note(environment, sandboxes, leave):
    trial = await scored(environment, sandboxes, f"wc -w <text.txt >answer.txt; {leave}")
    assert (trial.score.reward, trial.score.parts) == (0.0, {"answered": 0.0})
    [note] = trial.episode.notes
    assert "left out" in note


@pytest.mark.parametrize("end", ["at once", "at the next call"])
async def test_an_agent_is_scored_after_its_sandbox_has_ended(environment, sandboxes, end):
    def end_it(_):
        [info] = sandboxes.live()

        os.kill(info.pid, signal.SIGKILL)
        return turn("", call("finish", answer="done")) if end == "at once" else bash("sleep 5; true")

    solve, finish = bash("wc -w <text.txt >answer.txt"), turn("", call("finish", answer="done"))
    script = [
        solve,
        end_it,
        bash("sleep 1"),
        bash("sleep 1"),
        finish,
    ]  # the first call may be told that its shell died
    trial = await play(environment, environment.dataset()[0], ScriptedPolicy(script), sandboxes)
    assert (trial.score.reward, trial.score.parts) == (0.0, {"answered": 0.0})
    assert "sandbox ended" in trial.episode.notes[-1]
    expected = StopReason.FINISHED if end == "at once" else StopReason.SANDBOX_ENDED
    assert trial.stop_reason is expected


@pytest.mark.parametrize(
    "spoil", ["import os, sys; os.remove(sys.executable)", "import os; os.chmod('/run/rollout/sockets', 0)"]
)
async def test_an_agent_that_keeps_its_python_from_starting_again_is_scored(sandboxes, spoil):
    again = [turn("", call("python", code="1")) for _ in range(2)]
    script = [turn("", call("python", code=f"{spoil}; os._exit(1)")), *again, r"\boxed{0}"]
    policy = ScriptedPolicy(script)
    trial = await play(calc.environment, calc.environment.dataset()[0], policy, sandboxes)
    assert (trial.score.reward, trial.stop_reason) == (0.0, StopReason.ANSWERED)
    said = [message.content for message in policy.messages if message.role == "tool"]
    assert ["Python was restarted" in text for text in said] == [True] * 3


async def test_a_program_that_leaves_no_room_for_the_next_test_fails_its_tests(sandboxes):
    program = "\n".join(
        [
            "import os, sys",
            "if sys.stdin.read() == 'bomb' and os.fork() == 0:",
            " os.setsid()",
            " while True:",
            "  try: os.fork()",
            "  except OSError: pass",
            "print('ok')",
        ]
    )
    tests = [{"input": text, "output": "ok"} for text in ("bomb", "after")]
    task = {"question": "?", "kind": "stdio", "tests": tests, "time_limit": 1}
    submit = turn("", call("write", path="solution.py", content=program))
    trial = await play(code.environment, task, ScriptedPolicy([submit, "Done."]), sandboxes)
    assert trial.score.parts["submitted"] == 1.0


async def test_the_unpacked_image_that_sandboxes_share_is_mounted_read_only(sandboxes):
    sandbox = await sandboxes.start(code.environment.spec, "shared")
    mounts = await anyio.Path(f"/proc/{sandbox.info.pid}/mountinfo").read_text()
    await sandbox.close()
    shown = [fields for line in mounts.splitlines() if "idmapped" in (fields := line.split())[5]]
    assert "users" not in sandboxes.provider.enforced or shown
    assert all("ro" in fields[5].split(",") for fields in shown), shown
