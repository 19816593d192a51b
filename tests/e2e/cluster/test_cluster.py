"""Three services share a Redis: one is killed, stopped for a while or drained, and every rollout ends exactly once."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.service import Running, scripted_engine, service
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.redis
LONG = pytest.mark.extended("rollout_service/cluster/", "rollout_service/store/redis/")

PATIENCE_SECONDS = 90.0
DEAD_SECONDS = 15.0
"""The promised time until the rollouts of a dead node are queued again."""
LEADER_SECONDS = 10.0
"""The promised time until another node leads."""


@dataclass
class Nodes:
    """Three services, and what their store knows of them."""

    redis: RedisServer
    services: dict[str, Running]

    def url(self, node: str | None) -> str:
        """Return the address of a node, or of the first that runs."""
        return self.services[node or min(self.services)].url

    def get(self, path: str, node: str | None = None, **params: Any) -> Any:
        url = f"{self.url(node)}{path}"
        return httpx.get(url, params=params, timeout=60).raise_for_status().json()

    def post(self, path: str, body: Any = None, node: str | None = None, **params: Any) -> Any:
        url = f"{self.url(node)}{path}"
        return httpx.post(url, json=body, params=params, timeout=60).raise_for_status().json()

    def submit(self, count: int) -> list[str]:
        """Submit rollouts, each at another node than the one before."""
        ids = [f"r{number}" for number in range(count)]
        for number, rollout_id in enumerate(ids):
            task = {"environment": "echo", "instance": {"number": number}}
            node = list(self.services)[number % len(self.services)]
            self.post("/v1/rollouts", {"rollout_id": rollout_id, "task": task}, node)
        return ids

    def events(self, kind: str) -> list[dict[str, Any]]:
        entries = self.redis.do("XRANGE", "{nodes}:events", "-", "+")
        return [
            {"subject": fields[b"s"].decode(), **json.loads(fields[b"d"])}
            for _, fields in entries
            if fields[b"k"].decode() == kind
        ]

    def ends(self) -> Counter[str]:
        """Return how often each rollout has ended."""
        states = ("completed", "failed", "cancelled")
        return Counter(one["subject"] for one in self.events("rollout.state") if one["state"] in states)

    def view(self, name: str) -> dict[str, Any]:
        return next(node for node in self.get("/v1/nodes") if node["node"] == name)

    def leased(self) -> int:
        """Return how many rollouts are in a stage now."""
        counts = self.get("/v1/rollouts", limit=1)["counts"]
        return sum(counts.get(stage, 0) for stage in ("init", "rollout", "evaluate"))

    def leads(self, node: str) -> bool:
        metrics = httpx.get(f"{self.services[node].url}/metrics", timeout=60).text
        return 'rollout_node_leads{role="runs"} 1.0' in metrics

    def eventually(self, condition: Callable[[], bool]) -> float:
        """Wait until a condition holds, and return after how many seconds it did."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < PATIENCE_SECONDS, {
                name: one.log[-3_000:] for name, one in self.services.items()
            }
            time.sleep(0.05)
        return time.monotonic() - began

    def all_ended(self, ids: list[str]) -> bool:
        counts = self.get("/v1/rollouts", limit=1)["counts"]
        return int(counts.get("completed", 0)) == len(ids)

    def check_each_ended_once(self, ids: list[str]) -> None:
        assert self.ends() == Counter(ids)
        for rollout_id in ids:
            found = self.get(f"/v1/rollouts/{rollout_id}", trajectory=True)
            assert (found["state"], found["reward"]) == ("completed", 1.0)
            assert found["trajectory"]["segments"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        engine = stack.enter_context(scripted_engine(tmp_path, delay=0.5))
        services = {}
        for name in ("n1", "n2", "n3"):
            folder = tmp_path / name
            folder.mkdir()
            config = f'[store]\nurl = "{redis.url}"\nprefix = "nodes"\n[cluster]\nname = "{name}"\n'
            config += "[pipeline]\nrollout_workers = 2\ninit_workers = 2\n"
            config += "[sandboxes.pressure]\nenabled = false\n[sandboxes.warm]\nsize = 0\n"
            services[name] = stack.enter_context(service(folder, engine.url, config, turns=2))
        made = Nodes(redis, services)
        made.eventually(lambda: len(made.get("/v1/nodes")) == 3)
        yield made


def test_a_killed_node_loses_nothing_and_a_leader_is_followed(nodes, record_property):
    nodes.eventually(lambda: sum(map(nodes.leads, nodes.services)) == 1)
    victim = next(name for name in nodes.services if nodes.leads(name))
    ids = nodes.submit(24)
    nodes.eventually(lambda: len(nodes.ends()) >= 5)
    nodes.eventually(lambda: nodes.view(victim)["rollouts"] > 0)
    killed = nodes.services.pop(victim)
    killed.stop(signal.SIGKILL)
    killed.ended(30)
    leader_seconds = nodes.eventually(lambda: any(map(nodes.leads, nodes.services)))
    dead_seconds = leader_seconds + nodes.eventually(lambda: bool(nodes.events("node.dead")))
    record_property("leader_seconds", round(leader_seconds, 1))
    record_property("requeued_seconds", round(dead_seconds, 1))
    assert leader_seconds < LEADER_SECONDS + 5
    assert dead_seconds < DEAD_SECONDS
    [dead] = nodes.events("node.dead")
    assert dead["subject"] == victim
    assert dead["requeued"] > 0
    nodes.eventually(lambda: nodes.all_ended(ids))
    nodes.check_each_ended_once(ids)
    assert nodes.view(victim)["state"] == "dead"


@LONG
def test_a_node_that_slept_writes_over_no_result_and_joins_again(nodes):
    ids = nodes.submit(40)
    nodes.eventually(lambda: nodes.view("n3")["rollouts"] > 0 and len(nodes.ends()) >= 5)
    nodes.services["n3"].stop(signal.SIGSTOP)
    nodes.eventually(lambda: bool(nodes.events("node.dead")))
    nodes.eventually(lambda: nodes.all_ended(ids))
    nodes.services["n3"].stop(signal.SIGCONT)
    nodes.eventually(lambda: nodes.view("n3")["state"] == "ready")
    nodes.check_each_ended_once(ids)
    metrics = httpx.get(f"{nodes.services['n3'].url}/metrics", timeout=60).text
    lost = [line for line in metrics.splitlines() if line.startswith("rollout_lost_leases_total")]
    assert lost
    assert float(lost[0].split()[-1]) > 0
    nodes.post("/v1/nodes/n1/drain")
    nodes.post("/v1/nodes/n2/drain")
    task = {"environment": "echo", "instance": {"number": 1}}
    ended = nodes.post("/v1/rollouts", {"rollout_id": "after", "task": task}, wait=60)
    assert ended["state"] == "completed", "the node that slept works again"


@LONG
def test_a_drained_node_takes_nothing_until_it_is_resumed(nodes):
    assert nodes.post("/v1/nodes/n3/drain")["state"] == "draining"
    nodes.eventually(lambda: httpx.get(f"{nodes.services['n3'].url}/ready", timeout=60).status_code == 503)
    ids = nodes.submit(12)
    nodes.eventually(lambda: nodes.all_ended(ids))
    nodes.check_each_ended_once(ids)
    assert nodes.view("n3")["finished"] == 0
    assert nodes.view("n1")["finished"] + nodes.view("n2")["finished"] > 0
    nodes.post("/v1/nodes/n3/resume", node="n2")
    nodes.post("/v1/nodes/n1/drain", node="n3")
    nodes.post("/v1/nodes/n2/drain", node="n3")
    nodes.eventually(lambda: nodes.view("n2")["state"] == "draining")
    task = {"environment": "echo", "instance": {"number": 1}}
    ended = nodes.post("/v1/rollouts", {"rollout_id": "after", "task": task}, "n1", wait=60)
    assert ended["state"] == "completed"


def test_any_node_serves_runs_leases_and_acknowledgments(nodes):
    nodes.eventually(lambda: sum(map(nodes.leads, nodes.services)) == 1)
    leader = next(name for name in nodes.services if nodes.leads(name))
    one, other = (name for name in nodes.services if name != leader)
    tasks = [{"environment": "echo", "instance": {"number": number}} for number in range(6)]
    run = {"run_id": "run", "source": {"kind": "inline", "tasks": tasks}, "group_size": 2, "batch_size": 2}
    nodes.post("/v1/runs", run | {"filters": []}, one)
    delivered: list[str] = []
    for asked, acknowledging in ((other, one), (leader, other), (one, leader)):
        batch = nodes.post("/v1/runs/run/lease", None, asked, key="trainer", timeout=55)
        samples = [sample for group in batch["groups"] for sample in group["samples"]]
        delivered += [sample["rollout"]["rollout_id"] for sample in samples]
        nodes.post(f"/v1/runs/run/batches/{batch['batch_id']}/ack", None, acknowledging)
    assert len(set(delivered)) == len(delivered) == 12
    nodes.eventually(lambda: nodes.get("/v1/runs/run", other)["state"] == "finished")


@LONG
def test_a_cancellation_reaches_the_node_that_works_whichever_node_is_asked(nodes):
    for drained in ("n1", "n2"):
        nodes.post(f"/v1/nodes/{drained}/drain")
        nodes.eventually(lambda drained=drained: "draining" in _readiness(nodes, drained))  # type: ignore[misc]
    ids = nodes.submit(12)
    nodes.eventually(lambda: nodes.leased() >= 3)
    for rollout_id in reversed(ids):
        httpx.delete(f"{nodes.url('n2')}/v1/rollouts/{rollout_id}", timeout=60).raise_for_status()
    nodes.eventually(lambda: nodes.ends() == Counter(ids))
    asked = {event["subject"] for event in nodes.events("rollout.cancel_requested")}
    states = {nodes.get(f"/v1/rollouts/{rollout_id}")["state"] for rollout_id in asked}
    assert "cancelled" in states, "a rollout was under way at n3"


def _readiness(nodes: Nodes, node: str) -> str:
    return httpx.get(f"{nodes.url(node)}/ready", timeout=60).text
