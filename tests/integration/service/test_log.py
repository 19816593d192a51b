"""The log reports what happens to runs, weights, engines and requests."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollout_service.engines.shipped import policy_folder
from sandboxes.host.ports import free_port
from tests.support.processes.service import Running, eventually, running, service

CONFIG = 'log_format = "json"\nlog_level = "debug"\n'
FAKE = "rollout_service.testing"
RUN = {"run_id": "run", "source": {"kind": "inline", "open": True}, "group_size": 2, "batch_size": 1}


@pytest.fixture
def engine_port() -> int:
    return free_port()


@pytest.fixture
def server(tmp_path: Path, engine_port: int) -> Iterator[Running]:
    """Yield a service whose engine has not started yet."""
    with service(tmp_path, f"http://127.0.0.1:{engine_port}", CONFIG) as started:
        yield started


def entries(server: Running, event: str) -> list[dict[str, object]]:
    lines = [line for line in server.log.splitlines(keepends=True) if line.endswith("\n")]
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def said(server: Running, event: str) -> dict[str, object]:
    """Return the last log entry of an event, once there is one."""
    eventually(lambda: bool(entries(server, event)), server.log_file, seconds=40)
    return entries(server, event)[-1]


def test_runs_are_logged(server):
    httpx.post(f"{server.url}/v1/runs", json=RUN).raise_for_status()
    created = said(server, "run created")
    assert (created["run"], created["level"], created["source"]) == ("run", "info", "inline")
    httpx.patch(f"{server.url}/v1/runs/run", json={"state": "paused"}).raise_for_status()
    assert said(server, "run changed")["state"] == "paused"
    httpx.delete(f"{server.url}/v1/runs/run").raise_for_status()
    assert said(server, "run ended")["run"] == "run"
    requests = [(one["method"], one["path"], one["status"]) for one in entries(server, "request")]
    assert ("PATCH", "/v1/runs/run", 200) in requests


def test_engines_and_weights_are_logged(server, engine_port, tmp_path):
    assert str(engine_port) in str(said(server, "backend does not answer yet; trying again")["url"])
    engine = [FAKE, "--port", str(engine_port), "--address", str(tmp_path / "engine.address")]
    with running("engine", engine, tmp_path) as first:
        assert str(said(server, "backend registered")["backend_id"]).endswith(f"127.0.0.1:{engine_port}")
        weights = {"path": str(policy_folder("calc-tuned")), "version": 7}
        httpx.post(f"{server.url}/v1/weights", json=weights, timeout=60).raise_for_status()
        assert said(server, "weight update begun")["version"] == 7
        assert said(server, "weight update done")["changed"] is True
        assert httpx.post(f"{server.url}/v1/weights", json=weights | {"version": 6}).status_code == 409
        assert said(server, "weight update refused")["level"] == "error"
        assert not entries(server, "backend lost")
        first.stop()
        first.ended(30)
    assert said(server, "backend lost")["error"]
    with running("engine", engine, tmp_path):
        assert said(server, "backend is back")["weight_version"] == 7
