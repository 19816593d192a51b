"""Three services share a Redis: one is killed, stopped for a while or drained, and every rollout ends exactly once."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_server import redis_server

pytestmark = pytest.mark.redis
LONG = pytest.mark.extended("rollout_service/cluster/", "rollout_service/store/redis/")

DEAD_SECONDS = 15.0
"""The promised time until the rollouts of a dead node are queued again."""
LEADER_SECONDS = 10.0
"""The promised time until another node leads."""


@dataclass
class Nodes:
    """Services that share a store."""

    services: dict[str, Running]

    @property
    def first(self) -> Running:
        """The first node that runs."""
        return self.services[min(self.services)]

    def post(self, path: str, body: Any = None, node: str | None = None, **params: Any) -> Any:
        url = f"{(self.services[node] if node else self.first).url}{path}"
        return httpx.post(url, json=body, params=params, timeout=60).raise_for_status().json()

    def submit(self, count: int) -> list[str]:
        """Submit rollouts, each at another node than the one before."""
        ids = [f"r{number}" for number in range(count)]
        for rollout_id, node in zip(ids, cycle(self.services.values()), strict=False):
            node.submit(rollout_id).raise_for_status()
        return ids

    def dead(self) -> list[dict[str, Any]]:
        return [event for event in self.first.events() if event["kind"] == "node.dead"]

    def view(self, name: str) -> dict[str, Any]:
        return next(node for node in self.first.get("/v1/nodes") if node["node"] == name)

    def leaders(self) -> list[str]:
        return [name for name, one in self.services.items() if one.metric('rollout_node_leads{role="runs"}')]

    def eventually(self, condition: Callable[[], object]) -> float:
        """Wait until a condition holds, and return after how many seconds it did."""
        began = time.monotonic()
        eventually(condition, self.services.values())
        return time.monotonic() - began

    def wait_until_halfway(self, name: str) -> None:
        """Wait until some rollouts have ended, and a node works on others."""
        self.eventually(lambda: self.first.counts().get("completed", 0) >= 5 and self.view(name)["rollouts"] > 0)

    def check_each_ends_once(self, ids: list[str]) -> None:
        self.eventually(lambda: self.first.counts().get("completed") == len(ids))
        assert self.first.ends() == Counter(ids)
        for rollout_id in ids:
            found = self.first.get(f"/v1/rollouts/{rollout_id}", trajectory=True)
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
        made = Nodes(services)
        made.eventually(lambda: len(made.first.get("/v1/nodes")) == 3)
        yield made


def test_a_killed_node_loses_nothing_and_a_leader_is_followed(nodes, record_property):
    nodes.eventually(lambda: len(nodes.leaders()) == 1)
    [victim] = nodes.leaders()
    ids = nodes.submit(40)
    nodes.wait_until_halfway(victim)
    killed = nodes.services.pop(victim)
    killed.stop(signal.SIGKILL)
    killed.ended(30)
    leader_seconds = nodes.eventually(nodes.leaders)
    dead_seconds = leader_seconds + nodes.eventually(nodes.dead)
    record_property("leader_seconds", round(leader_seconds, 1))
    record_property("requeued_seconds", round(dead_seconds, 1))
    assert leader_seconds < LEADER_SECONDS + 5
    assert dead_seconds < DEAD_SECONDS
    [dead] = nodes.dead()
    assert dead["subject"] == victim
    assert dead["data"]["requeued"] > 0
    nodes.check_each_ends_once(ids)
    assert nodes.view(victim)["state"] == "dead"


@LONG
def test_a_node_that_slept_writes_over_no_result_and_joins_again(nodes):
    ids = nodes.submit(40)
    nodes.wait_until_halfway("n3")
    nodes.services["n3"].stop(signal.SIGSTOP)
    nodes.eventually(nodes.dead)
    nodes.eventually(lambda: nodes.first.counts().get("completed") == len(ids))
    nodes.services["n3"].stop(signal.SIGCONT)
    nodes.eventually(lambda: nodes.view("n3")["state"] == "ready")
    nodes.check_each_ends_once(ids)
    assert nodes.services["n3"].metric("rollout_lost_leases_total") > 0
    nodes.post("/v1/nodes/n1/drain")
    nodes.post("/v1/nodes/n2/drain")
    task = {"environment": "echo", "instance": {"number": 1}}
    ended = nodes.post("/v1/rollouts", {"rollout_id": "after", "task": task}, wait=60)
    assert ended["state"] == "completed", "the node that slept works again"


def test_any_node_serves_runs_leases_and_acknowledgments(nodes):
    nodes.eventually(lambda: len(nodes.leaders()) == 1)
    [leader] = nodes.leaders()
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
    nodes.eventually(lambda: nodes.services[other].get("/v1/runs/run")["state"] == "finished")


@LONG
def test_a_cancellation_reaches_the_node_that_works_whichever_node_is_asked(nodes):
    for drained in ("n1", "n2"):
        nodes.post(f"/v1/nodes/{drained}/drain")
        nodes.eventually(lambda drained=drained: "draining" in nodes.services[drained].ready().text)  # type: ignore[misc]
    ids, stages = nodes.submit(12), ("init", "rollout", "evaluate")
    nodes.eventually(lambda: sum(nodes.first.counts().get(stage, 0) for stage in stages) >= 3)
    for rollout_id in reversed(ids):
        httpx.delete(f"{nodes.services['n2'].url}/v1/rollouts/{rollout_id}", timeout=60).raise_for_status()
    nodes.eventually(lambda: nodes.first.ends() == Counter(ids))
    asked = {event["subject"] for event in nodes.first.events() if event["kind"] == "rollout.cancel_requested"}
    assert "cancelled" in map(nodes.first.state, asked), "a rollout was under way at n3"
