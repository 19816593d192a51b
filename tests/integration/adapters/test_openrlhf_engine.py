"""OpenRLHF's engine, the real vLLM without HTTP, serves the rollouts of its actor, and is gone with it."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollout_client import SyncRolloutClient
from rollout_service.engines.shipped import policy_folder
from tests.support.api.server import api_server
from tests.support.engines.with_transformers import ask_transformers
from tests.support.processes.service import eventually
from tests.support.vllm_cpu import DEFAULT_ENVIRONMENT

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
PYTHON = Path(os.environ.get("ROLLOUT_VLLM_ENV", DEFAULT_ENVIRONMENT)) / "bin" / "python"
VLLM = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
TASK = json.dumps({"environment": "calc", "instance": {"question": "12 + 30", "answer": 42}})
TOLERANCE = 1e-4


class Actor:
    """The program with the executor and its engine, and what it answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, *order: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or '"the program ended"')


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with api_server(tmp_path_factory.mktemp("service"), sandbox="apptainer") as server:
        yield server.url


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the policy, of which the program makes its next weights."""
    return shutil.copytree(policy_folder("calc-base"), tmp_path_factory.mktemp("weights") / "next")


@pytest.fixture(scope="module")
def actor(url: str, new_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actor]:
    home = tmp_path_factory.mktemp("home")
    more = {"ROLLOUT_URL": url, "PYTHONPATH": str(ROOT), "HOME": str(home)}
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(
            [PYTHON, "-W", "ignore", SUPPORT / "adapters/openrlhf_engine.py", policy_folder("calc-base")],
            env=os.environ | VLLM | more | {"NEW_WEIGHTS": str(new_weights / "model.safetensors")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # vLLM's worker must end too, even if the program was killed
        ) as process,
    ):
        try:
            actor = Actor(process)
            assert actor.answer() == {}, (home / "log").read_text()
            yield actor
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def largest_difference(model: Path, rollouts: list[dict[str, Any]]) -> float:
    """Return how far the logprobs of the sampled tokens are from those of transformers."""
    ids = [one["observation_tokens"] for one in rollouts]
    sequences = [{"prompt": each[:1], "output": each[1:], "temperature": 1.0} for each in ids]
    order = {"model": str(model), "sequences": sequences}
    answer = ask_transformers(PYTHON.parents[1], "recompute_logprobs.py", order)
    return max(
        abs(rollout["rollout_log_probs"][position] - logprobs[position - 1])
        for rollout, logprobs in zip(rollouts, answer, strict=True)
        for start, end in rollout["action_ranges"]
        for position in range(start, end)
    )


def versions(client: SyncRolloutClient, count: int) -> set[int]:
    """Return the versions of the tokens that the last rollouts sampled."""
    rollouts = [client.get(one.rollout_id, trajectory=True) for one in islice(client.summaries(), count)]
    assert len(rollouts) == count
    segments = [segment for one in rollouts for segment in one.trajectory.segments]
    return {version for segment in segments for version in segment.versions} - {-1}


@pytest.mark.apptainer
@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(480)
@pytest.mark.slow(seconds=120)
def test_the_engine_of_openrlhfs_actor_serves_its_rollouts(url, actor, new_weights) -> None:
    with SyncRolloutClient(url) as client:
        rollouts = actor("rollouts", TASK, 4)
        assert largest_difference(policy_folder("calc-base"), rollouts) < TOLERANCE
        assert sum(len(one["action_ranges"]) for one in rollouts) > 4, "some took more than one turn"
        assert versions(client, 4) == {0}
        (backend,) = client.backends()
        assert backend.pool.startswith("openrlhf-")
        assert (backend.kind, backend.weight_version) == ("sglang", 0)

        actor("update")
        assert client.backends()[0].weight_version == 1, "the service knows before the actor goes on"
        rollouts = actor("rollouts", TASK, 2)
        assert versions(client, 2) == {1}
        assert largest_difference(new_weights, rollouts) < TOLERANCE
        assert largest_difference(policy_folder("calc-base"), rollouts) > 100 * TOLERANCE

        assert actor("hold", TASK) == 1
        (running,) = client.summaries(states=["rollout"])
        client.cancel(running.rollout_id)
        assert actor("until", 0) == 0, "a cancelled rollout leaves the engine, although it is paused"
        assert running.rollout_id in actor("let_go")

        actor("close")
        assert client.backends() == []
        actor("rollouts", TASK, 1)
        assert len(client.backends()) == 1
        actor.process.kill()
        eventually(lambda: client.backends() == [])
