"""A service starts, says what it does in its log, and is ready when it can work."""

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import HttpUrl
from rich.console import Console

from api_schemas.inference import BackendSpec
from rollout_client.errors import NotFoundError, UnavailableError
from rollout_service.cli.submit.progress import ProgressView, Tally, explain_waiting
from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer
from sandboxes.host.ports import free_port
from tests.support.gateway.service import gateway_service, scripted
from tests.support.processes.service import Running, eventually, running, service


def serve(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout_service.cli", "serve", "--port", "0", "--sandbox", "local"]
    return subprocess.run(
        [*command, "--state-dir", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | variables,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "keys", "says"),
    [
        (["--model", "/nowhere"], None, "/nowhere/config.json"),
        (["--host", "0.0.0.0"], None, "no key is set"),
        (["--config", "/nowhere.toml"], None, "settings file /nowhere.toml does not exist"),
        (["--host", "0.0.0.0"], "abc", "error: ROLLOUT_KEYS: keys"),
        (["--engine", "none", "--state-dir", "/proc/nowhere"], None, "--state-dir"),
        (["--engine", "none"], None, "not a database"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(tmp_path, flags, keys, says):
    if says == "not a database":
        (tmp_path / "rollouts.sqlite3").write_bytes(b"not one, and long enough to be taken for none" * 100)
    ended = serve(tmp_path, *flags, **({} if keys is None else {"ROLLOUT_KEYS": keys}))
    assert ended.returncode != 0
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_message_ends_before_the_hint_begins(tmp_path):
    address = tmp_path / "address"
    flags = ["--port", "0", "--sandbox", "local", "--engine", "none", "--state-dir", str(tmp_path)]
    command = [sys.executable, "-m", "rollout_service.cli", "serve", *flags, "--port-file", str(address)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as first:
        try:
            while not address.exists():
                assert first.poll() is None
                time.sleep(0.05)
            for line in first.stderr:
                if b"startup complete" in line:
                    break
            second = serve(tmp_path, "--engine", "none")
        finally:
            first.terminate()
            first.communicate(timeout=60)
    assert second.returncode != 0
    assert f"is in use by the process with pid {first.pid}\nhint: " in second.stderr
    assert "--state-dir" in second.stderr


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


async def test_the_default_pool_without_an_engine_while_another_pool_has_one(tmp_path):
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        unready = await service.client.readiness()
        assert (unready.ready, unready.warnings) == (False, [])
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url), pool="judge"))
        readiness = await service.client.readiness()
        assert readiness.ready
        [warning] = readiness.warnings
        assert "no backend of pool 'policy' is in service" in warning
        assert "judge" not in warning
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
        assert (await service.client.readiness()).warnings == []


async def test_a_service_is_not_ready_while_it_loads_the_chat_format_of_its_engine(tmp_path, monkeypatch):
    load, loads, is_loaded = ChatRenderer.load, threading.Event(), threading.Event()

    def load_late(path: str, renderer: str | None) -> ChatRenderer:
        loads.set()
        assert is_loaded.wait(30)
        return load(path, renderer)

    monkeypatch.setattr(ChatRenderer, "load", staticmethod(load_late))
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.client.add_backend, BackendSpec(url=HttpUrl(engine.url)))
            assert await anyio.to_thread.run_sync(loads.wait, 20)
            assert not (await service.client.readiness()).ready
            is_loaded.set()
        assert [view.state for view in await service.client.backends()] == ["ready"]
        assert (await service.client.readiness()).ready


async def test_an_order_for_a_pool_that_does_not_exist_is_refused_for_good(tmp_path):
    async with scripted("a") as engine, gateway_service(tmp_path, []) as service:
        with pytest.raises(UnavailableError):  # an engine may be registered yet
            await service.client.update_weights("/w/1", 1)
        await service.client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
        with pytest.raises(NotFoundError, match="there is no pool 'polciy'; did you mean policy") as caught:
            await service.client.update_weights("/w/1", 1, pool="polciy")
        assert (caught.value.problem.code, caught.value.problem.retryable) == ("unknown_pool", False)


async def test_submit_says_which_line_is_for_a_pool_without_a_backend(tmp_path):
    said = io.StringIO()
    view = ProgressView(Console(file=said, width=200), Tally(1))
    async with (
        scripted("a") as engine,
        gateway_service(tmp_path, [engine]) as service,
        explain_waiting(service.client, view, {"policy": 1, "judge": 2}),
    ):
        with anyio.fail_after(20):
            while not said.getvalue():
                await anyio.sleep(0.01)
    assert said.getvalue() == (
        "Waiting: line 2 is for the pool 'judge', which has no backend; the server's pools are policy.\n"
    )


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "walks.md"
LANDMARKS = [
    "rollout_service/http/protocol.py",
    "rollout_service/gateway/server/app.py",
    "rollout_service/gateway/dialects/openai_chat_requests.py",
    "rollout_service/gateway/capture/capture.py",
    "rollout_service/tokens/renderer.py",
    "rollout_service/engines/pool/dispatch.py",
    "rollout_service/engines/kinds/sglang/backend.py",
    "rollout_service/gateway/dialects/openai_chat_answers.py",
]


@pytest.mark.extended("rollout_service/")
@pytest.mark.timeout(120)
def test_a_call_at_the_gateway_passes_the_files_of_the_page(tmp_path):
    figures = tmp_path / "walk.json"
    subprocess.run([ROOT / "scripts" / "walk", "gateway", "--json", figures], check=True, capture_output=True)
    passed: list[str] = json.loads(figures.read_text())["gateway"]
    assert [file for file in passed if file in LANDMARKS] == LANDMARKS
    told = set(files_of(PAGE.read_text().partition("## A call of Chat Completions")[2].partition("\n## ")[0]))
    assert len(told ^ set(passed)) <= 10, (told - set(passed), set(passed) - told)


def test_every_file_of_the_page_exists():
    found = files_of(PAGE.read_text().partition("\n## ")[2])
    assert len(found) > 300
    assert not [file for file in found if not (ROOT / file).is_file()]


def files_of(text: str) -> list[str]:
    """Return the paths in walks, each without a package for those of the service."""
    paths = []
    walks = [part for part in text.split("\n\n") if "\u2192" in part]
    for group in "\u2192".join(walks).split("\u2192"):
        folder, names = re.fullmatch(r"\s*(?:`(.*?)`)?\s*([\w,\s]+)", group).groups()  # type: ignore[union-attr]
        package = "" if (folder or "").startswith(("api_schemas", "sandboxes")) else "rollout_service/"
        paths += [f"{package}{folder or ''}{name.strip()}.py" for name in names.split(",")]
    return paths
