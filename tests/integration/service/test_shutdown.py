"""On a planned stop, waiters are answered at once, nothing new begins, and the process ends in time whatever hangs."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from api_schemas.errors import Problem
from tests.support.processes.service import Running, eventually, scripted_engine, service

DRAIN_SECONDS = 2.0
LAST_SECONDS = 3.0
SLACK_SECONDS = 1.0
"""Slack for a busy machine between a process's end and its parent's notice of it."""
CONFIG = f"[pipeline]\ndrain_seconds = {DRAIN_SECONDS}\n"
RUN = {
    "run_id": "run",
    "source": {"kind": "inline", "tasks": [{"environment": "echo", "instance": {"number": 1}}]},
    "group_size": 2,
    "batch_size": 1,
}


@pytest.fixture(scope="module")
def slow_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of an engine that is slow enough for rollouts of many turns to outlast every test."""
    with scripted_engine(tmp_path_factory.mktemp("engine"), delay=0.2) as engine:
        yield engine.url


@pytest.fixture
def server(tmp_path: Path, slow_engine: str) -> Iterator[Running]:
    with service(tmp_path, slow_engine, CONFIG, turns=1_000) as started:
        yield started


def order(rollout_id: str) -> dict:
    return {"rollout_id": rollout_id, "task": {"environment": "echo", "instance": {"number": 1}}}


def read_events(url: str, begun: threading.Event) -> httpx.Response:
    with httpx.stream("GET", f"{url}/v1/events", params={"after": 0}, timeout=60) as response:
        for line in response.iter_lines():
            if "rollout.state" in line:
                begun.set()
        return response


def waiters(url: str, pool: ThreadPoolExecutor) -> dict[str, Future[httpx.Response]]:
    """Send a request to every route that can wait, and return their futures."""
    calls: dict[str, Callable[[], httpx.Response]] = {
        "order": lambda: httpx.post(f"{url}/v1/rollouts", params={"wait": 60}, json=order("b"), timeout=90),
        "result": lambda: httpx.get(f"{url}/v1/rollouts/a", params={"wait": 60}, timeout=90),
        "lease": lambda: httpx.post(f"{url}/v1/runs/run/lease", params={"timeout": 60}, timeout=90),
        "process": lambda: httpx.post(
            f"{url}/process",
            json={
                "instance": {"data_source": "echo", "number": 1},
                "sampling_params": {"max_iterations": 1_000},  # two by default, which end at once
            },
            timeout=90,
        ),
    }
    begun = threading.Event()
    waiting = {"events": pool.submit(read_events, url, begun)}
    waiting |= {name: pool.submit(call) for name, call in calls.items()}
    assert begun.wait(30)
    return waiting


def test_waiting_callers_are_answered_at_once(server):
    httpx.post(f"{server.url}/v1/rollouts", json=order("a")).raise_for_status()
    httpx.post(f"{server.url}/v1/runs", json=RUN).raise_for_status()
    with ThreadPoolExecutor() as pool:
        waiting = waiters(server.url, pool)
        orders = lambda: httpx.get(f"{server.url}/v1/rollouts").json()["counts"].get("rollout", 0)  # noqa: E731
        eventually(lambda: orders() == 5, server.log_file)
        time.sleep(0.3)  # waits on the existing rollout and run leave no trace
        stopped = time.monotonic()
        server.stop()
        answers = {name: answer.result(30) for name, answer in waiting.items()}
        answered = time.monotonic() - stopped
        assert answered < DRAIN_SECONDS / 2 + SLACK_SECONDS
        assert answers["order"].status_code == 202, "it is durable, and has not ended"
        assert answers["events"].status_code == 200, "the stream ends whole"
        for name in ("result", "lease", "process"):
            assert_refused(answers[name])
        assert Problem.model_validate_json(answers["process"].content).context["job_id"]
        if server.process.poll() is None:  # it still drains
            assert_refused(httpx.post(f"{server.url}/v1/rollouts", json=order("c")))
            assert_refused(httpx.get(f"{server.url}/v1/rollouts/a", params={"wait": 60}))
            assert httpx.get(f"{server.url}/v1/rollouts/a").status_code == 200
            assert "shutting down" in httpx.get(f"{server.url}/ready").text
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.post(f"{server.url}/v1/abort", json={"rollout_ids": ["c"]}).status_code == 202
        assert server.ended(30) == -signal.SIGTERM
        assert time.monotonic() - stopped < DRAIN_SECONDS + LAST_SECONDS + SLACK_SECONDS
    assert "Traceback" not in server.log
    assert "reason=SIGTERM" in server.log
    assert "handed_back=5" in server.log


def test_the_log_says_where_it_listens_and_why_it_ended(tmp_path):
    with service(tmp_path, None, 'log_format = "json"\n') as server:
        server.stop()
        assert server.ended(30) == -signal.SIGTERM
    entries = [json.loads(line) for line in server.log.splitlines()]
    (started,) = [entry for entry in entries if entry["event"] == "listening"]
    assert started["address"] == server.url
    assert started["settings_file"] == str(tmp_path / "service.toml")
    assert started["state_dir"] == str(tmp_path / "state")
    assert started["engine"] == "none"
    assert entries[-1]["event"] == "stopped"
    assert entries[-1]["reason"] == "SIGTERM"
    assert "uvicorn.error" not in {entry["logger"] for entry in entries}


def assert_refused(answer: httpx.Response) -> None:
    problem = Problem.model_validate_json(answer.content)
    assert (answer.status_code, problem.code, problem.retryable) == (503, "shutting_down", True)
    assert float(answer.headers["retry-after"]) > 0
    assert answer.headers["connection"] == "close"


def test_a_second_signal_ends_the_drain(tmp_path, slow_engine):
    with service(tmp_path, slow_engine, "[pipeline]\ndrain_seconds = 600\n", turns=1_000) as server:
        httpx.post(f"{server.url}/v1/rollouts", json=order("a")).raise_for_status()
        eventually(lambda: httpx.get(f"{server.url}/v1/rollouts/a").json()["state"] == "rollout", server.log_file)
        server.stop()
        eventually(lambda: "shutting down" in server.log, server.log_file)
        server.stop()
        assert server.ended(LAST_SECONDS + SLACK_SECONDS) == -signal.SIGTERM
        assert "handed_back=1" in server.log


def test_a_signal_while_it_starts_ends_it(tmp_path):
    """Use an engine whose model takes long to load: one that does not answer would not delay the start."""
    command = [sys.executable, "-m", "rollout_service.cli", "serve", "--port", "0", "--sandbox", "local"]
    command += ["--state-dir", str(tmp_path / "state"), "--engine", "embedded"]
    log = tmp_path / "log"
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, cwd=tmp_path) as process:
        eventually(lambda: "swept what was left" in log.read_text() or process.poll() is not None, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    assert "listening" not in log.read_text()
    assert "Traceback" not in log.read_text()


HANGING = """
import socket, time
import uvicorn
from rollout_service.http.drain import DrainingServer
from rollout_service.http.connections import ConnectionLimits, Connections
from rollout_service.http.protocol import RequestLimits
from rollout_service.base.shutdown import Shutdown
from rollout_service.settings import LogFormat
from rollout_service.observability.telemetry.logging import configure_logging

configure_logging(LogFormat.CONSOLE, "info")

async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    HANG

shutdown = Shutdown(0.2)
DrainingServer(
    uvicorn.Config(app, log_config=None, lifespan="on", ws="none"),
    socket.create_server(("127.0.0.1", 0)),
    connections=Connections(ConnectionLimits.within(1_000, None)),
    limits=RequestLimits(),
    observe=print,
    shutdown=shutdown,
    on_start=lambda: print("started", flush=True),
).run()
"""


@pytest.mark.parametrize("hang", ["await __import__('asyncio').sleep(600)", "time.sleep(600)"])
def test_the_process_ends_in_time_even_if_something_hangs(tmp_path, hang):
    script = tmp_path / "hanging.py"
    script.write_text(HANGING.replace("HANG", f"shutdown.end(); {hang}"))
    with subprocess.Popen([sys.executable, script], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        stopped = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - stopped < 0.2 + LAST_SECONDS + SLACK_SECONDS
    assert "the shutdown took too long" in log
    assert "still_open=['0 connections'" in log
