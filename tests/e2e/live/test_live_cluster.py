"""Two services share a Redis, each with live sessions of its own: one run gets the parts of both, each once."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.service import Running, scripted_engine, service
from tests.support.redis_server import redis_server

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

NODES = ("n1", "n2")
SESSIONS = 6
TURN = "Hello.<|im_end|>"
RUN = {
    "run_id": "live",
    "source": {"kind": "inline", "open": True},
    "group_size": 1,
    "batch_size": 1,
    "filters": [],
    "live": {"max_user_share": 1.0, "max_session_share": 1.0},
}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        engine = stack.enter_context(scripted_engine(tmp_path, TURN, delay=0))
        services = []
        for name in NODES:
            folder = tmp_path / name
            folder.mkdir()
            config = f'[store]\nurl = "{redis.url}"\nprefix = "live"\n[cluster]\nname = "{name}"\n'
            config += "[sandboxes.pressure]\nenabled = false\n[sandboxes.warm]\nsize = 0\n"
            services.append(stack.enter_context(service(folder, engine.url, config)))
        yield services


def test_a_run_gets_the_sessions_of_all_nodes(nodes):
    with httpx.Client(timeout=60) as http:
        http.post(f"{nodes[0].url}/v1/runs", json=RUN).raise_for_status()
        for number in range(SESSIONS):
            talk(http, nodes[number % len(nodes)].url, f"s{number}")
        rollouts = [batch_of(http, nodes[number % len(nodes)].url) for number in range(SESSIONS)]
        left = [http.get(f"{node.url}/v1/sessions").json()["counts"] for node in nodes]
    assert Counter(rollout["session"]["session_id"] for rollout in rollouts) == Counter(
        f"s{number}" for number in range(SESSIONS)
    )
    assert all(rollout["reward"] == 1.0 for rollout in rollouts)
    assert [(counts["delivered"], counts["waiting"]) for counts in left] == [(SESSIONS // 2, 0)] * 2


def talk(http: httpx.Client, url: str, session_id: str) -> None:
    """Open a session at a node, take a turn, praise it, and end."""
    opened = post(http, f"{url}/v1/sessions", {"session_id": session_id, "train": True}).json()
    messages = [{"role": "user", "content": "Go."}]
    headers = {"authorization": f"Bearer {opened['key']}"}
    call = {"model": "policy", "messages": messages}
    post(http, f"{opened['url']}/v1/chat/completions", call, headers)
    post(http, f"{url}/v1/sessions/{session_id}/feedback", {"value": 1.0, "turn": 0})
    post(http, f"{url}/v1/sessions/{session_id}/end", {})


def batch_of(http: httpx.Client, url: str) -> dict[str, Any]:
    """Lease a batch of one rollout from a node, acknowledge it, and return the rollout."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        leased = http.post(f"{url}/v1/runs/live/lease", params={"timeout": 10}).raise_for_status()
        if leased.status_code == 200:
            batch = leased.json()
            http.post(f"{url}/v1/runs/live/batches/{batch['batch_id']}/ack").raise_for_status()
            rollout: dict[str, Any] = batch["groups"][0]["samples"][0]["rollout"]
            return rollout
    raise AssertionError("no batch came")


def post(http: httpx.Client, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    """Send a request until the service has its engine, and the turn is there."""
    deadline = time.monotonic() + 60
    while (answer := http.post(url, json=body, headers=headers)).status_code in (404, 503):
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    return answer.raise_for_status()
