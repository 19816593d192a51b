"""Services on one Redis: rollouts end once each, through restarts and outages, on whichever node they run."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client.sync import SyncRolloutClient
from tests.support.processes.service import Running, eventually, scripted_engine, service
from tests.support.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.redis, pytest.mark.timeout(150)]


def config(server: RedisServer, name: str) -> str:
    return f'[store]\nurl = "{server.url}"\n[cluster]\nname = "{name}"\n'


def node(tmp_path: Path, name: str, engine: Running, server: RedisServer) -> Any:
    """Run a service of this name, in a folder of its own."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return service(folder, engine.url, config(server, name))


def test_a_program_works_with_any_node_on_a_rollout_that_one_runs(tmp_path, own_redis):
    request = RolloutRequest(rollout_id="r", task=Task(environment="echo", instance={"number": 1}))
    with (
        scripted_engine(tmp_path, delay=0.05) as engine,
        node(tmp_path, "n1", engine, own_redis) as one,
        node(tmp_path, "n2", engine, own_redis) as other,
        SyncRolloutClient(other.url) as client,
    ):
        assert httpx.post(f"{other.url}/v1/nodes/n2/drain").status_code == 200
        eventually(lambda: [each.state for each in client.nodes()] == ["ready", "draining"], other.log_file)
        with client.external_rollout(request) as rollout:
            shown = one.get("/v1/rollouts/r")
            assert rollout.openai == {
                "base_url": f"{shown['access']['url']}/v1",
                "api_key": shown["access"]["key"],
            }
            assert "access" not in other.get("/v1/rollouts/r")
            key = {"authorization": f"Bearer {rollout.openai['api_key']}"}
            models = httpx.get(f"{rollout.openai['base_url']}/models", headers=key)
            assert models.status_code == 200
            late = httpx.post(f"{other.url}/v1/rollouts/r/end", json={"reward": 1.0, "attempt": 7})
            assert late.status_code == 409
            rollout.end(reward=0.5)
        assert rollout.result().reward == 0.5
        unknown = httpx.post(f"{other.url}/v1/rollouts/none/end", json={})
        assert unknown.status_code == 404


def test_a_restarted_service_goes_on_with_what_it_had(tmp_path, own_redis):
    with scripted_engine(tmp_path, delay=0.3) as engine:
        with node(tmp_path, "n1", engine, own_redis) as server:
            server.submit_all(range(30))
            server.stop(signal.SIGKILL)
            server.ended(30)
        with node(tmp_path, "n1", engine, own_redis) as server:
            eventually(lambda: server.counts() == {"completed": 30}, server.log_file, 60)
            assert server.ends() == Counter(f"r{n}" for n in range(30))


def test_a_service_does_not_start_on_a_redis_that_it_must_not_use(tmp_path):
    with (
        redis_server(options={"appendfsync": "everysec"}) as server,
        scripted_engine(tmp_path, delay=0) as engine,
        pytest.raises(AssertionError, match="its appendfsync is everysec"),
    ):
        start(node(tmp_path, "n1", engine, server))


def start(server: Any) -> None:
    """Start a service and fail with its log, since it ends at once."""
    with server as running:
        raise AssertionError(f"{running.ended(30)}: {running.log}")
