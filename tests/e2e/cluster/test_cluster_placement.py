"""Of two services that share a Redis, only the one with an environment's labels, or with its image, runs its rollouts.

What is queued outlives a restart without the labels, and runs once they are back.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandboxes.images.store import ImageStore
from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_server import RedisServer, redis_server

pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.extended("rollout_service/cluster/", "sandboxes/"),
]

LABELS = ["gpu", "fast"]
ENDS = ("completed", "failed", "cancelled")
TUNED = """
name = "tuned"
image = "base"
prompt = "Say {{ instance.number }}."
tools = ["bash"]
[limits]
max_turns = 1
[sandbox]
requires = ["gpu", "fast"]
[evaluate]
command = "echo '{\\"reward\\": 1.0}' > $ROLLOUT_RESULT"
"""


@dataclass
class Cluster:
    """Starts services that share a Redis and an engine."""

    folder: Path
    redis: RedisServer
    engine: Running
    stack: ExitStack

    def start(self, name: str, labels: list[str], settings: str = "", *flags: str) -> Running:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        config = settings + f'[store]\nurl = "{self.redis.url}"\n[cluster]\nname = "{name}"\nlabels = {labels}\n'
        config += "[sandboxes.pressure]\nenabled = false\n[sandboxes.warm]\nsize = 0\n"
        environment = str(self.folder / "tuned")
        return self.stack.enter_context(service(folder, self.engine.url, config, "--environment", environment, *flags))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    environment = tmp_path / "tuned"
    environment.mkdir()
    (environment / "environment.toml").write_text(TUNED)
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        engine = stack.enter_context(scripted_engine(tmp_path, delay=0.1))
        yield Cluster(tmp_path, redis, engine, stack)


def view(node: Running, name: str) -> dict[str, Any]:
    return next(one for one in node.get("/v1/nodes") if one["node"] == name)


def test_rollouts_wait_for_the_node_with_their_labels(cluster):
    plain, fast = cluster.start("plain", []), cluster.start("fast", LABELS)
    nodes = {"plain": plain, "fast": fast}
    eventually(lambda: len(plain.get("/v1/nodes")) == 2, nodes.values())
    assert "tuned" not in view(plain, "plain")["environments"]
    eventually(lambda: plain.submit("r0", "tuned").status_code == 202, nodes.values())  # it has heard of the other
    for number in range(1, 5):
        assert plain.submit(f"r{number}", "tuned").status_code == 202
    eventually(lambda: plain.counts().get("completed") == 5, nodes.values())
    eventually(lambda: view(plain, "fast")["finished"] == 5, nodes.values())
    assert view(plain, "plain")["finished"] == 0
    httpx.post(f"{fast.url}/v1/nodes/fast/drain", timeout=60).raise_for_status()
    assert plain.submit("echo", "echo").status_code == 202
    eventually(lambda: plain.state("echo") == "completed", nodes.values())
    eventually(lambda: view(plain, "plain")["finished"] == 1, nodes.values())  # a heartbeat tells it
    httpx.post(f"{fast.url}/v1/nodes/fast/resume", timeout=60).raise_for_status()
    eventually(lambda: plain.submit("r5", "tuned").status_code == 202, nodes.values())
    fast.stop(signal.SIGSTOP)
    for number in range(6, 9):
        assert plain.submit(f"r{number}", "tuned").status_code == 202
    fast.stop(signal.SIGKILL)
    fast.ended(30)
    eventually(lambda: plain.submit("none", "tuned").status_code == 422, nodes.values())
    refused = plain.submit("none", "tuned").json()
    assert "fast, gpu" in str(refused)
    assert "[cluster] labels" in str(refused)

    poor = cluster.start("fast", [])
    httpx.post(f"{plain.url}/v1/nodes/plain/drain", timeout=60).raise_for_status()
    eventually(lambda: poor.submit("another", "echo").status_code == 202, nodes.values())
    eventually(lambda: poor.state("another") == "completed", nodes.values())
    assert [plain.state(f"r{number}") for number in range(6, 9)] == ["queued"] * 3
    poor.stop()
    poor.ended(60)
    cluster.start("fast", LABELS)
    waiting = [f"/v1/rollouts/r{number}" for number in range(5, 9)]
    eventually(lambda: all(plain.get(path)["state"] == "completed" for path in waiting), nodes.values())


@pytest.mark.apptainer
def test_rollouts_wait_for_the_busy_node_with_their_image(cluster, tmp_path):
    one_at_once = f'images_dir = "{ImageStore().root}"\n[pipeline]\ninit_workers = 1\nrollout_workers = 1\n'
    full = cluster.start("full", [], one_at_once, "--sandbox", "apptainer")
    bare = cluster.start("bare", [], f'images_dir = "{tmp_path}/none"\n', "--sandbox", "apptainer")
    nodes = {"full": full, "bare": bare}
    eventually(lambda: "echo" in view(bare, "full")["images"], nodes.values())
    eventually(lambda: bare.submit("r0", "echo").status_code == 202, nodes.values())  # it has heard of the other
    for number in range(1, 6):
        assert bare.submit(f"r{number}", "echo").status_code == 202
    eventually(lambda: sum(bare.counts().get(state, 0) for state in ENDS) == 6, nodes.values())
    assert bare.counts()["completed"] == 6
    eventually(lambda: view(bare, "full")["finished"] == 6, nodes.values())
    assert "echo" not in view(bare, "bare")["images"]
