"""The demo works on real parts: Apptainer, with the embedded engine and with SGLang."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from api_schemas.rollouts import Rollout
from rollout_service.engines.local_servers.cpu_server import DEFAULT_ENVIRONMENT
from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens.trajectory import check_invariants
from tests.support.engines.with_transformers import ask_transformers
from tests.support.redis_server import program as redis_program

pytestmark = pytest.mark.slow(seconds=130)

TOLERANCE = 1e-3
COMMAND = [sys.executable, "-m", "rollout_service.cli", "demo"]


def demo(folder, *flags: str) -> tuple[dict[str, float], list[Rollout], str]:
    """Run the demo; return its figures, its batch and its output."""
    figures, output = folder / "figures.json", folder / "batch.jsonl"
    files = ["--state-dir", str(folder / "state"), "--output", str(output), "--json", str(figures)]
    result = subprocess.run([*COMMAND, *flags, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr + result.stdout
    rollouts = [Rollout.model_validate_json(line) for line in output.read_text().splitlines()]
    return json.loads(figures.read_text())["figures"], rollouts, result.stdout


def check_logprobs(rollouts: list[Rollout]) -> None:
    """Assert that transformers computes the same logprob for every sampled token from the trajectory's ids alone."""
    segments = [segment for rollout in rollouts for segment in rollout.trajectory.segments]
    sequences = [
        {"prompt": segment.token_ids[:1], "output": segment.token_ids[1:], "temperature": 1.0} for segment in segments
    ]
    order = {"model": str(policy_folder("calc-tuned")), "sequences": sequences}
    answer = ask_transformers(DEFAULT_ENVIRONMENT, "recompute_logprobs.py", order)
    for segment, recomputed in zip(segments, answer, strict=True):
        served = zip(segment.loss_mask[1:], segment.logprobs[1:], recomputed, strict=True)
        assert max(abs(ours - theirs) for mask, ours, theirs in served if mask) < TOLERANCE


@pytest.mark.apptainer
@pytest.mark.sglang
def test_the_demo_in_apptainer(tmp_path):
    figures, rollouts, printed = demo(tmp_path, "--rollouts", "16")
    assert figures["rollouts"] == len({rollout.rollout_id for rollout in rollouts}) == 16
    assert figures["failed"] == 0
    assert figures["success_rate"] >= 0.9
    for rollout in rollouts:
        check_invariants(rollout.trajectory)
        assert all(span.sandbox_seconds > 0 for span in rollout.spans if span.stage == "init")
    check_logprobs(rollouts)
    for part in ("<tool_call>", "<tool_response>", "mask 0", "mask 1", "logprobs", "sandbox start"):
        assert part in printed


@pytest.mark.extended("rollout_service/cli/demo/")
@pytest.mark.apptainer
def test_a_demo_draws_the_same_samples_again(tmp_path):
    def drawn(name: str, *flags: str) -> dict[str, list[list[int]]]:
        (tmp_path / name).mkdir()
        _, rollouts, _ = demo(tmp_path / name, "--rollouts", "4", "--policy", "calc-base", *flags)
        return {
            str(rollout.task.instance): [segment.token_ids for segment in rollout.trajectory.segments]
            for rollout in rollouts
        }

    once = drawn("once")
    assert drawn("again") == once
    assert drawn("other", "--seed", "100") != once


@pytest.mark.extended("rollout_service/cli/demo/")
@pytest.mark.redis
def test_a_node_that_is_killed_on_the_way_loses_no_rollout(tmp_path, monkeypatch):
    folder = Path(redis_program()).parent
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    figures, rollouts, _ = demo(tmp_path, "--nodes", "2", "--rollouts", "16", "--sandbox", "local")
    assert figures["rollouts"] == len({rollout.rollout_id for rollout in rollouts}) == 16
    assert figures["failed"] == 0
    for rollout in rollouts:
        check_invariants(rollout.trajectory)
    logs = [(tmp_path / "state" / name / "server.log").read_text() for name in ("node-1", "node-2")]
    assert ["reason=SIGTERM" in log for log in logs] == [True, False], "only one could stop in order"


@pytest.mark.redis
def test_a_demo_of_several_nodes_says_how_to_get_a_redis(tmp_path):
    command = [*COMMAND, "--nodes", "2", "--sandbox", "local", "--state-dir", str(tmp_path)]
    refused = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": "/nowhere", "HOME": str(tmp_path)}
    )
    assert refused.returncode != 0
    assert "scripts/demo" in refused.stderr


@pytest.mark.extended("rollout_service/cli/demo/")
@pytest.mark.apptainer
@pytest.mark.sglang
@pytest.mark.xdist_group("sglang")  # one SGLang at a time: its scheduler spins on a core
@pytest.mark.timeout(400)
def test_the_demo_with_sglang(tmp_path):
    figures, rollouts, _ = demo(tmp_path, "--engine", "sglang", "--rollouts", "8")
    assert figures["failed"] == 0
    assert figures["success_rate"] >= 0.5, "one in fifty fails by chance, and eight are few"
    for rollout in rollouts:
        check_invariants(rollout.trajectory)
        assert rollout.usage.cached_tokens > 0
    check_logprobs(rollouts)


def test_a_demo_that_stays_serves_its_page_until_it_is_interrupted(tmp_path):
    flags = ["--rollouts", "4", "--sandbox", "local", "--stay", "--state-dir", str(tmp_path)]
    with subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        lines = iter(demo.stderr.readline, "")
        url = next(line.split()[1] for line in lines if line.startswith("page: "))
        page, rollouts = httpx.get(url), httpx.get(f"{url}v1/rollouts")
        assert "<title>Rollout service</title>" in page.text
        assert rollouts.json()["counts"] == {"completed": 4}
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 0
        assert "success" in demo.stdout.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
