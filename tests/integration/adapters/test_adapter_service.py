"""Adapters work with a service over HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api.server import api_server
from tests.support.processes.service import scripted_engine

ROWS = Path(__file__).parents[3] / "examples" / "adapters" / "rows.py"
ANSWER = r"It is \boxed{4}.<|im_end|>"
TASK = {"environment": "math", "instance": {"question": "2 + 2", "answer": "4"}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a service whose policy always gives the same answer."""
    folder = tmp_path_factory.mktemp("adapters")
    with (
        scripted_engine(folder, ANSWER) as engine,
        api_server(folder, "--backend", engine.url) as server,
    ):
        yield server.url


def rows(url: str) -> dict:
    command = [sys.executable, str(ROWS), "--task", json.dumps(TASK)]
    environ = {"ROLLOUT_URL": url, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_trainer_gets_the_same_ids(url) -> None:
    got = rows(url)
    whole = got["verl"]["prompt_ids"] + got["verl"]["response_ids"]
    sampled, logprobs = got["verl"]["response_ids"], got["verl"]["response_logprobs"]
    assert got["verl"]["reward_score"] == 1.0
    (sample,) = got["slime"]
    assert (sample["tokens"], sample["response_length"]) == (whole, len(sampled))
    assert sample["rollout_log_probs"] == logprobs
    assert got["skyrl"]["response_ids"] == [sampled, sampled]
    assert got["areal"]["input_ids"] == [whole]
    assert got["areal"]["rewards"] == [1.0]
    assert got["openrlhf"]["observation_tokens"] == whole
    assert got["openrlhf"]["action_ranges"] == [[len(whole) - len(sampled), len(whole)]]
    (item,) = got["nemo_gym"]["response"]["output"]
    assert item["prompt_token_ids"] + item["generation_token_ids"] == whole
    assert item["generation_log_probs"] == logprobs
