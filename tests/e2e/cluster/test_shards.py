"""Two services share a store of two Redis: one that is away takes its own runs with it, and they come back with it."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_server import RedisServer, redis_server
from tests.support.store.sharded import names_of_shard

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]
SHARDS = 2
ROLLOUTS, TASKS = 10, 4


@dataclass
class Spread:
    """The services and their Redis."""

    servers: list[RedisServer]
    services: list[Running]
    start_again: Callable[[int], Running]
    """Stops a service and starts another one in its place."""

    def post(self, path: str, body: Any = None, node: int = 0, **params: Any) -> httpx.Response:
        return httpx.post(f"{self.services[node].url}{path}", json=body, params=params, timeout=90)

    def submit(self, names: list[str]) -> None:
        for number, name in enumerate(names):
            task = {"environment": "echo", "instance": {"number": number}}
            self.post("/v1/rollouts", {"rollout_id": name, "task": task}, number % 2).raise_for_status()

    def create_run(self, name: str) -> None:
        tasks = [{"environment": "echo", "instance": {"number": number}} for number in range(TASKS)]
        run = {"run_id": name, "source": {"kind": "inline", "tasks": tasks}, "group_size": 2, "batch_size": 1}
        self.post("/v1/runs", run | {"filters": []}).raise_for_status()

    def deliver(self, run: str) -> list[str]:
        """Lease and acknowledge all batches of a run; return their rollouts."""
        found: list[str] = []
        while (answer := self.post(f"/v1/runs/{run}/lease", node=1, key="t", timeout=55)).is_success:
            batch = answer.json()
            found += [one["rollout"]["rollout_id"] for group in batch["groups"] for one in group["samples"]]
            self.post(f"/v1/runs/{run}/batches/{batch['batch_id']}/ack").raise_for_status()
        assert answer.status_code == 410, answer.text
        return found

    def states(self, names: list[str]) -> set[str]:
        return {self.services[0].state(name) for name in names}

    def ends(self) -> Counter[str]:
        """Return how often each rollout has ended, by the events of both shards."""
        return self.services[0].ends("0.0")

    def position(self) -> list[str]:
        """Return the ids of the newest events of all shards."""
        url = f"{self.services[0].url}/v1/events"
        sent = httpx.get(url, params={"follow": "false"}, timeout=60).raise_for_status().text
        return sent.splitlines()[0].removeprefix("id: ").split(".")

    def eventually(self, condition: Any) -> None:
        eventually(condition, self.services)

    def wait_until_well(self) -> None:
        """Wait until every service has noticed that all shards answer."""
        self.eventually(lambda: not any("wait" in one.ready().text for one in self.services))


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Spread]:
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server()) for _ in range(SHARDS)]
        engine = stack.enter_context(scripted_engine(tmp_path, delay=1.0))
        urls = ", ".join(f'"{server.url}"' for server in servers)
        services: list[Running] = []

        def start(name: str) -> Running:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            config = f'[store]\nurl = [{urls}]\nprefix = "spread"\nfolder = "{tmp_path / "shared"}"\n'
            config += f'[cluster]\nname = "{name}"\n'
            config += "[pipeline]\nrollout_workers = 3\ninit_workers = 3\nlease_seconds = 6\ndrain_seconds = 3\n"
            config += "[sandboxes.pressure]\nenabled = false\n[sandboxes.warm]\nsize = 0\n"
            return stack.enter_context(service(folder, engine.url, config, turns=2))

        def start_again(number: int) -> Running:
            services[number].stop()
            assert services[number].ended(30) is not None
            services[number] = start(f"n{number + 1}")
            return services[number]

        services += [start(name) for name in ("n1", "n2")]
        made = Spread(servers, services, start_again)
        made.eventually(lambda: len(services[0].get("/v1/nodes")) == len(services))
        for one in services:
            one.wait_until_ready()
        yield made


@pytest.mark.parametrize("victim", [1, 0], ids=["another", "home"])
def test_a_killed_shard_takes_only_its_own_runs_with_it(spread, victim, tmp_path):
    other = 1 - victim
    rollouts = [names_of_shard(shard, ROLLOUTS, "r") for shard in range(SHARDS)]
    runs = [names_of_shard(shard, 1, "run")[0] for shard in range(SHARDS)]
    for name in runs:
        spread.create_run(name)
    spread.submit([name for pair in zip(*rollouts, strict=True) for name in pair])
    spread.eventually(lambda: spread.services[0].counts().get("completed", 0) >= 3)
    spread.servers[victim].kill()
    assert spread.services[0].counts().get("completed", 0) < ROLLOUTS + 2 * TASKS, "it was killed at work"

    delivered = spread.deliver(runs[other])
    assert len(set(delivered)) == len(delivered) == 2 * TASKS
    more = names_of_shard(other, 4, "later")
    spread.submit(more)
    spread.eventually(lambda: spread.states([*rollouts[other], *more]) == {"completed"})
    ready = spread.services[0].ready()
    assert ready.is_success
    assert f"the runs of shard {victim} of {SHARDS} wait" in ready.text
    assert spread.services[0].metric(f'rollout_store_shard_failing{{shard="{victim}"}}') == 1
    assert spread.services[0].metric(f'rollout_store_shard_failing{{shard="{other}"}}') == 0
    listed = spread.services[1].get("/v1/rollouts", limit=100)["rollouts"]
    assert {one["rollout_id"] for one in listed} == {*rollouts[other], *more, *delivered}
    assert [run["run_id"] for run in spread.services[1].get("/v1/runs")["runs"]] == [runs[other]]
    position = spread.position()
    assert (position[victim], position[other].isdecimal()) == ("-", True)
    refused = spread.services[0].submit(names_of_shard(victim, 1, "x")[0])
    assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")

    spread.servers[victim].start()
    spread.wait_until_well()
    delivered += spread.deliver(runs[victim])
    assert len(set(delivered)) == len(delivered) == SHARDS * 2 * TASKS
    whole = [*rollouts[0], *rollouts[1], *more]
    spread.eventually(lambda: spread.states(whole) == {"completed"})
    assert spread.ends() == Counter([*whole, *delivered]), "nothing is lost, and nothing ends twice"
    since = {one["subject"] for one in spread.services[0].events(".".join(position))}
    assert not since & {*rollouts[victim], runs[victim]}, "what came while nobody could know is passed over"
    assert spread.services[0].events(".".join(spread.position())) == []
    found = subprocess.run(
        [sys.executable, "-m", "rollout_service.cli", "store", "check", "--json"],
        cwd=tmp_path / "n1",
        env=os.environ | {"ROLLOUT_CONFIG": str(tmp_path / "n1" / "service.toml")},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(found.stdout)
    assert (report["trajectories"], report["lost"]) == (len(whole) + len(delivered), [])
    assert {path.parent.name for path in (tmp_path / "shared").rglob("*.segment")} == {"shard-0", "shard-1"}
    for name in (*whole, *delivered):
        assert spread.services[1].get(f"/v1/rollouts/{name}/trajectory")["segments"]


def test_a_shard_that_stands_still_keeps_nothing_else_waiting(spread):
    spread.submit([*names_of_shard(0, 4, "r"), *names_of_shard(1, 4, "r")])
    with spread.servers[1].paused():
        spread.eventually(lambda: "shard 1 of 2 wait" in spread.services[0].ready().text)
        others = names_of_shard(0, 6, "s")
        spread.submit(others)
        spread.eventually(lambda: spread.states(others) == {"completed"})
        nodes = spread.services[0].get("/v1/nodes")
        assert [node["state"] for node in nodes] == ["ready", "ready"], "nobody was taken for dead"
    spread.wait_until_well()
    spread.eventually(lambda: spread.states(names_of_shard(1, 4, "r")) == {"completed"})
    assert set(spread.ends().values()) == {1}


def test_a_service_starts_while_a_shard_is_away(spread):
    spread.submit([*names_of_shard(0, 2, "r"), *names_of_shard(1, 4, "r")])
    spread.servers[1].kill()
    restarted = spread.start_again(1)
    spread.eventually(lambda: "shard 1 of 2 wait" in restarted.ready().text)
    others = names_of_shard(0, 6, "s")
    spread.submit(others)
    spread.eventually(lambda: spread.states([*others, *names_of_shard(0, 2, "r")]) == {"completed"})
    spread.servers[1].start()
    spread.wait_until_well()
    later = names_of_shard(1, 4, "later")
    spread.submit(later)
    spread.eventually(lambda: spread.states([*names_of_shard(1, 4, "r"), *later]) == {"completed"})
    assert set(spread.ends().values()) == {1}
    assert restarted.get(f"/v1/rollouts/{later[0]}/trajectory")["segments"]
