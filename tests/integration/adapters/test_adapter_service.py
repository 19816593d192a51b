"""Adapters, and a trainer written for the ProRL Agent server, work with a service over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.adapters.service import engine, service

ROWS = Path(__file__).parents[3] / "examples" / "adapters" / "rows.py"
ANSWER = r"It is \boxed{4}.<|im_end|>"
TASK = {"environment": "math", "instance": {"question": "2 + 2", "answer": "4"}}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the URLs of a service and of its engine, whose policy always gives the same answer."""
    folder = tmp_path_factory.mktemp("adapters")
    with (
        engine(folder, ANSWER) as engine_url,
        service(folder, "--engine", "none", "--backend", engine_url) as url,
    ):
        yield url, engine_url


def rows(url: str) -> dict:
    command = [sys.executable, str(ROWS), "--task", json.dumps(TASK)]
    environ = {"ROLLOUT_URL": url, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_trainer_gets_the_same_ids(addresses) -> None:
    url, _ = addresses
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


def test_a_trainer_for_the_prorl_agent_server_changes_only_its_address(addresses) -> None:
    """Make such a trainer's calls in its order: engines, start, a batch of jobs with some to spare, cancel, stop."""
    url, engine_url = addresses
    with httpx.Client(base_url=url, timeout=60) as server, ThreadPoolExecutor(4) as workers:

        def call(path: str, **body: object) -> dict:
            return server.post(path, json=body).raise_for_status().json()

        def process(number: int) -> dict:
            instance = {"data_source": "math", **TASK["instance"], "instance_id": f"i-{number}"}
            sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "repetition_penalty": 1.0}
            body = {"instance": instance, "sampling_params": sampling, "job_id": f"prorl-{number}"}
            return server.post("/process", json=body).json()

        assert call("/clear_llm_server")["removed"] == 1
        for address in (engine_url.removeprefix("http://"), f"{engine_url}/v1"):
            assert call("/add_llm_server", address=address)["status"] == "success"
        call("/start")
        assert server.get("/status").json()["running"] is True
        assert call("/cancel", job_id="prorl-3")["job_id"] == "prorl-3"
        results = list(workers.map(process, range(4)))
        for result in results[:3]:
            assert result["resolved"] is True
            assert result["report"]["error"] is None
            assert result["timing"]["timeout_triggered"] is False
            (turn,) = [one for one in result["messages"] if one["role"] == "assistant"]
            assert len(turn["token_ids"]) == len(turn["logprobs"]) > 0
            assert turn["input_ids"]
        assert results[3]["status"] == 500
        assert call("/stop")["cancelled"] == []
        status = server.get("/status").json()
        assert (status["status"], status["pending_jobs"], status["running"]) == ("stopped", 0, False)
        call("/start")  # for the tests that follow
