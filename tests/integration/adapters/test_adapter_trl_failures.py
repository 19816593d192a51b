"""The real TRL does not train on a rollout without a reward, and does not count it as a zero."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
QUIET = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("rewards", "mean", "moves"),
    [
        (["1.0", "null"], 1.0, False),  # as a zero, it would make the mean 0.5 and move the weights
        (["1.0", "0.0", "null"], 0.5, True),
    ],
)
def test_a_failure_is_neither_trained_on_nor_a_zero(rewards, mean, moves):
    command = [
        ROOT / ".venv-trainers" / "bin" / "python",
        ROOT / "tests" / "support" / "adapters" / "trl_failures.py",
        *rewards,
    ]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["reward"] == mean
    assert (got["moved"] > 0) is moves
    assert got["log"]["rollouts/failed"] == pytest.approx(1 / len(rewards))
