"""Trainers' own code, past the hook: rows, masks, log-probabilities, advantages, losses, weights and versions agree."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adapters.real_trainers import QUIET
from tests.support.api.server import api_server

ROOT = Path(__file__).parents[3]
CUDA_ONLY = ROOT / "tests" / "support" / "adapters" / "cuda_only"
PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
DROPS = "drops its group; {} rows of the other one are left"
ENDS = "ends the step with NoRewardError"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    flags = ["--model", "calc-base", "--rollout-workers", "16"]
    with api_server(folder, *flags, engine="embedded", sandbox="apptainer") as server:
        yield server.url


def check(url: str, name: str, *flags: str, **environ: str) -> tuple[int, dict, str]:
    command = [sys.executable, "-m", "rollout_service.cli", "trainer", "check", name, "--json", "--url", url]
    command += ["--python", str(PYTHON), *flags]
    done = subprocess.run(
        command,
        env=os.environ | QUIET | EAGER | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.apptainer
@pytest.mark.trainers
@pytest.mark.slow(seconds=120)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "rows", "failure"),
    [
        ("verl", 17, DROPS.format(5)),  # a rollout in two segments is two rows
        ("verl_v0", 16, ENDS),
        ("areal", 16, DROPS.format(4)),
        ("skyrl", 17, ENDS),
        ("openrlhf", 16, ENDS),
        ("tinker", 16, DROPS.format(4)),  # the cookbook joins segments that extend each other
        ("trl", 16, DROPS.format(4)),
    ],
)
def test_two_steps_of_training_agree_with_independent_computations(url, name, rows, failure):
    environ = {"PYTHONPATH": str(CUDA_ONLY)} if name == "openrlhf" else {}
    code, report, output = check(url, name, **environ)
    assert code == 0, output
    assert report["problems"] == []
    assert [step["rows"] for step in report["steps"]] == [rows, rows]
    assert [step["segments"] for step in report["steps"]] == [2, 2]
    assert [step["wrong_rows"] + step["wrong_advantages"] for step in report["steps"]] == [0, 0]
    assert report["max_logprob_diff"] < 1e-4
    first, second = (step["version"] for step in report["steps"])
    assert second == first + 1
    assert report["failure"] == failure


@pytest.mark.trainers
def test_a_check_that_cannot_be_made_says_what_the_trainer_said(url):
    code, report, output = check(url, "areal", "--environment", "nowhere")
    assert (code, report) == (1, {})
    assert "nowhere" in output
    code, _, output = check(url, "areal", "--python", sys.executable)
    assert code == 1
    assert "No module named 'areal'" in output
    code, _, output = check(url, "unknown")
    assert "There are checks for areal, openrlhf, skyrl, tinker, trl, verl" in output
