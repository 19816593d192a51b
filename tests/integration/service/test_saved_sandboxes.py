"""After a crash, a rollout goes on in a copy of its sandbox: no tool runs again, and its shell is as it was."""

import signal
from pathlib import Path

import pytest

from api_schemas.trajectories import Trajectory
from rollout_service.tokens import check_invariants
from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.turns import called, turn_of

pytestmark = pytest.mark.apptainer

TURNS = 6
CONFIG = "[sandboxes]\nsave_seconds = 0.01\n"
FIRST = "mkdir -p deep; cd deep; : >log; marks=$(date +%N); now() { date +%N; }; echo $marks"
"""Its output, and those of the turns after it, would differ if it ran again."""


def call(command: str) -> str:
    return turn_of(called("bash", command=command))


STARTS_A_PROGRAM = "(sleep 1000 &); echo $marks $(date +%N)"
"""After it, the sandbox is not saved any more, and what it printed is not printed again."""


def outputs(running: Running, name: str) -> list[str]:
    """Return the results of a rollout's tool calls, which were all sampled once."""
    found = Trajectory.model_validate(running.get(f"/v1/rollouts/{name}/trajectory"))
    check_invariants(found)
    assert len(found.finish_reasons) == TURNS
    return [message.content for message in found.messages if message.role == "tool"]


def crash(running: Running, saves: int) -> None:
    """Kill the service once it has saved a sandbox this many times."""
    eventually(lambda: running.metric('rollout_sandbox_saves_total{outcome="saved"}') >= saves, running)
    running.stop(signal.SIGKILL)
    running.ended(30)


@pytest.mark.parametrize("shared", [False, True], ids=["own setup", "shared setup"])
def test_a_rollout_goes_on_in_copies_of_its_sandbox(tmp_path: Path, shared: bool) -> None:
    init = f"[init]\ncommand = 'echo init >>inits'\nshared = {str(shared).lower()}\n"
    step = "echo $(($(wc -l <log) + 1)) | tee -a log; echo $marks $(wc -l <../inits) $(now)"
    folder = tmp_path / "state" / "saved-sandboxes"
    with scripted_engine(
        tmp_path, call(f"{FIRST}; (exit 3)"), *[call(f"{step} # {n}") for n in range(TURNS)], delay=0.4
    ) as engine:
        for crashes in range(3):
            with service(tmp_path, engine.url, CONFIG, turns=TURNS, sandbox="apptainer", init=init) as running:
                if crashes < 2:
                    if not crashes:
                        running.submit("r1").raise_for_status()
                    crash(running, saves=2 - crashes)
                    assert len(list(folder.glob("*.sandbox"))) == 1
                    continue
                eventually(lambda: running.state("r1") in {"completed", "failed"}, running)
                first, *later = outputs(running, "r1")
                assert [text.split()[0] for text in later] == [str(number) for number in range(1, TURNS - 1)]
                assert {tuple(text.split()[1:3]) for text in later} == {(first.split()[0], "1")}
                assert running.get("/v1/rollouts/r1/trajectory")["tool_error_turns"] == [0]
                assert running.metric('rollout_resumes_total{outcome="resumed",reason=""}') == 1
                assert list(folder.iterdir()) == []


def test_turns_after_the_last_copy_that_cannot_be_repeated_are_sampled_again(tmp_path: Path) -> None:
    commands = [FIRST, *[f"{STARTS_A_PROGRAM} # {n}" for n in range(1, TURNS)]]
    with scripted_engine(tmp_path, *map(call, commands), delay=0.2) as engine:
        with service(tmp_path, engine.url, CONFIG, turns=TURNS, sandbox="apptainer") as running:
            running.submit("r1").raise_for_status()
            eventually(lambda: running.metric('rollout_saved_turns_total{outcome="saved"}') >= 3, running)
            crash(running, saves=1)
        with service(tmp_path, engine.url, CONFIG, turns=TURNS, sandbox="apptainer") as running:
            eventually(lambda: running.state("r1") in {"completed", "failed"}, running)
            first, *later = outputs(running, "r1")
            assert {text.split()[0] for text in later} == {first.strip()}
            resumes = 'rollout_resumes_total{{outcome="{}",reason="{}"}}'
            assert running.metric(resumes.format("shortened", "output_differs")) == 1
            assert running.metric(resumes.format("resumed", "")) == 1
            assert running.metric(resumes.format("begun_anew", "output_differs")) == 0
