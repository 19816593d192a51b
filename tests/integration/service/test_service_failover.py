"""Services hold what they have while their Redis fails over, and go on from what its replica had."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_failover import RedisPair, redis_pair
from tests.support.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.timeout(170)]

LEASE_SECONDS = 600
"""So long that nothing goes on because a lease ran out."""


@pytest.fixture
def pair() -> Iterator[RedisPair]:
    with redis_pair() as made:
        yield made


@pytest.fixture
def nodes(pair: RedisPair, tmp_path: Path) -> Iterator[list[Running]]:
    """Run two nodes whose Redis is at an address that can move."""
    with ExitStack() as stack:
        engine = stack.enter_context(scripted_engine(tmp_path, delay=0.3))
        started = []
        for name in ("n1", "n2"):
            folder = tmp_path / name
            folder.mkdir()
            config = f'[store]\nurl = "{pair.url}"\nprefix = "nodes"\n[cluster]\nname = "{name}"\n'
            config += f"[pipeline]\nlease_seconds = {LEASE_SECONDS}\nrollout_workers = 2\n"
            config += "[sandboxes.warm]\nsize = 0\n[sandboxes.pressure]\nenabled = false\n"
            started.append(stack.enter_context(service(folder, engine.url, config)))
        yield started


def ends(server: RedisServer) -> Counter[str]:
    entries = [fields for _, fields in server.do("XRANGE", "{nodes}:events", "-", "+")]
    found = [(one[b"s"].decode(), json.loads(one[b"d"])) for one in entries if one[b"k"] == b"rollout.state"]
    return Counter(subject for subject, data in found if data["state"] == "completed")


def test_nodes_hold_say_so_and_go_on_when_the_replica_takes_over(pair, nodes):
    ids = [f"r{number}" for number in range(16)]
    for number, rollout_id in enumerate(ids):
        nodes[number % 2].submit(rollout_id).raise_for_status()
    eventually(lambda: nodes[0].counts().get("completed", 0) >= 2, nodes)
    pair.primary.do("WAIT", 1, 10_000)
    pair.primary.kill()
    for node in nodes:
        eventually(lambda node=node: node.ready().status_code == 503, nodes)  # type: ignore[misc]
        assert "Redis" in node.ready().text
        assert httpx.get(f"{node.url}/health", timeout=60).status_code == 200
    pair.fail_over()
    for node in nodes:
        eventually(lambda node=node: node.ready().status_code == 200, nodes)  # type: ignore[misc]
    eventually(lambda: nodes[1].counts().get("completed") == len(ids), nodes)
    assert ends(pair.replica) == Counter(ids)
    nodes[0].submit("after").raise_for_status()
    eventually(lambda: nodes[1].counts().get("completed") == len(ids) + 1, nodes)
