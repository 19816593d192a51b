"""The reference trainer on real parts: weights move under a running service, and a killed trainer goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer.curves import read_points

from rollout_service.inference.embedded.weights import read_tensors

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_calc.py"
SMALL = [
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
END_SECONDS = 150


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), *SMALL, "--out", str(out), *flags]


def test_two_steps_change_the_weights_that_sample(tmp_path):
    figures = tmp_path / "figures.json"
    flags = ["--steps", "3", "--target", "2", "--max-staleness", "1", "--json", str(figures)]
    result = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=END_SECONDS)
    assert result.returncode == 0, result.stderr
    assert json.loads(figures.read_text())["steps"] == 3
    points = read_points(tmp_path / "curve.jsonl")
    assert [point["step"] for point in points] == [1, 2, 3]
    for point in points:
        assert point["gradient_norm"] > 0
        assert 0 < point["reward"] < 1
        assert point["staleness_max"] <= 1
    # Tokens of the newest weights alone: the engine sampled with what the trainer had published.
    fresh = [point for point in points if point["staleness_max"] == 0]
    assert points[0] in fresh
    assert max(point["logprob_gap_max"] for point in fresh) < 1e-3
    first, last = (read_tensors(tmp_path / "checkpoints" / f"step-{step}") for step in (1, 3))
    assert any((first[name] != last[name]).any() for name in first)


def test_a_trainer_that_is_killed_trains_on_every_batch_once(tmp_path):
    curve = tmp_path / "curve.jsonl"
    with subprocess.Popen(command(tmp_path, "--steps", "50", "--target", "2")) as process:
        try:
            until(lambda: len(read_points(curve)) >= 1, process)
        finally:
            process.send_signal(signal.SIGKILL)
    done = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    flags = ["--steps", str(done + 1), "--target", "2"]
    result = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=END_SECONDS)
    assert result.returncode == 0, result.stderr
    assert f"going on after step {done}" in result.stdout
    points = read_points(curve)
    assert [point["step"] for point in points][-1] == done + 1
    batches = [point["batch"] for point in points]
    assert batches == sorted(set(batches))


def until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert process.poll() is None, "the trainer ended too early"
        assert time.monotonic() < deadline, "the trainer took too long"
        time.sleep(0.1)


pytestmark = pytest.mark.timeout(2 * END_SECONDS + 60)
