"""The reference trainer continues after it is killed, and the weights that it publishes are those that sample."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer.curves import read_points

from rollout_service.engines.kinds.embedded.weights import read_tensors

pytestmark = [pytest.mark.extended("training/", "examples/"), pytest.mark.slow(seconds=120)]

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_calc.py"
FLAGS = [
    "--sandbox",
    "local",
    "--batch-size",
    "2",
    "--group-size",
    "4",
    "--evaluations",
    "0",
    "--workers",
    "4",
]
FLAGS += ["--max-staleness", "1", "--target", "2"]
PATIENCE_SECONDS = 280


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), *FLAGS, "--out", str(out), *flags]


def until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, "the trainer ended too early"
        assert time.monotonic() < deadline, "the trainer took too long"
        time.sleep(0.1)


@pytest.mark.timeout(2 * PATIENCE_SECONDS + 30)
def test_a_killed_trainer_resumes_and_updates_the_weights(tmp_path):
    curve, checkpoints = tmp_path / "curve.jsonl", tmp_path / "checkpoints"
    with subprocess.Popen(command(tmp_path)) as process:
        try:
            until(lambda: list(checkpoints.glob("step-*")), process)
        finally:
            process.send_signal(signal.SIGKILL)
    done = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))

    figures = tmp_path / "figures.json"
    flags = ["--steps", str(done + 1), "--json", str(figures)]
    result = subprocess.run(
        command(tmp_path, *flags), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"going on after step {done}" in result.stdout
    assert json.loads(figures.read_text())["steps"] == done + 1

    points = read_points(curve)
    assert [point["step"] for point in points] == list(range(1, done + 2))
    batches = [point["batch"] for point in points]
    assert batches == sorted(set(batches))  # each was trained on once, also the one in hand at the kill
    for point in points:
        assert point["gradient_norm"] > 0
        assert 0 < point["reward"] < 1
        assert point["staleness_max"] <= 1
    # If all tokens come from the weights that the step began with, the engine had exactly those weights.
    fresh = [point for point in points if point["staleness_max"] == 0]
    assert points[0] in fresh
    assert max(point["logprob_gap_max"] for point in fresh) < 1e-3
    before, after = (read_tensors(checkpoints / f"step-{step}") for step in (done, done + 1))
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.timeout(PATIENCE_SECONDS + 30)
def test_the_trainer_learns_from_an_agent_that_is_a_program(tmp_path):
    figures = tmp_path / "figures.json"
    place = str(EXAMPLES / "environments" / "calc_openai")
    flags = ["--add-environment", place, "--environment", "calc-openai", "--max-staleness", "0"]
    flags += ["--batch-size", "1", "--steps", "1", "--json", str(figures)]
    python = Path(sys.executable).parent  # has the package that the agent imports
    subprocess.run(
        command(tmp_path, *flags),
        env=os.environ | {"PATH": f"{python}:{os.environ['PATH']}"},
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    [point] = read_points(tmp_path / "curve.jsonl")
    assert json.loads(figures.read_text())["rewards"] == [point["reward"]]
    assert 0 < point["reward"] < 1
    assert point["gradient_norm"] > 0
    # The recorded tokens are those that the engine sampled: the trainer finds the same log-probabilities.
    assert point["logprob_gap_max"] < 1e-3


@pytest.mark.timeout(PATIENCE_SECONDS + 30)
def test_a_policy_learns_to_hand_on_work_to_a_second_engine(tmp_path):
    figures = tmp_path / "figures.json"
    flags = ["--environment", "pointers", "--auxiliary", "annealed", "--evaluations", "8", "--steps", "1"]
    result = subprocess.run(
        command(tmp_path, *flags, "--json", str(figures)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(figures.read_text())
    assert found["final_critical_steps"] > 1
    assert found["settings"]["dividing"]["auxiliary"] == "annealed"
    [point] = read_points(tmp_path / "curve.jsonl")
    assert point["critical_steps"] > 1
    assert point["gradient_norm"] > 0
    assert (tmp_path / "sub_agents.png").exists()
