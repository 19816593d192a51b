"""`doctor --live` and the dashboard name the cause of an incident within a minute, and nothing else; `/ready` does if
work waits.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.service import Running, scripted_engine, service
from tests.support.store.disks import SmallDisk, small_disk

pytestmark = [
    pytest.mark.extended("rollout_service/cli/doctor/", "rollout_service/server/"),
    pytest.mark.slow(seconds=60),
    pytest.mark.timeout(180),
]

NAMED_WITHIN = 60.0
SHOWN = ("reasons", "warnings", "backends", "errors", "findings")
"""The parts of the overview that the dashboard's first page shows as they are."""
CALM = "[sandboxes.pressure]\nenabled = false\n"
HANGING = """
name = "hanging"
image = "base"
prompt = "Say something."
tools = ["bash"]
[limits]
max_turns = 1
[evaluate]
command = "sleep 600"
"""
HUNGRY = """
name = "hungry"
image = "base"
prompt = "Say something."
tools = ["bash"]
[limits]
max_turns = 1
[sandbox]
memory = "64M"
[evaluate]
command = "python3 -c 'import time; kept = bytearray(1 << 30); time.sleep(60)'"
"""
CLOCK = """
import os, time
real = time.time
time.time = lambda: real() - (7200 if os.path.exists({flag!r}) else 0)
"""


@pytest.fixture
def engine(folder: Path) -> Iterator[Running]:
    with scripted_engine(folder, delay=0.05) as started:
        yield started


@pytest.fixture
def disk(folder: Path) -> Iterator[SmallDisk]:
    with small_disk(folder / "disk") as mounted:
        yield mounted


def inject(engine: Running, fault: str) -> None:
    """Let an engine answer every request like this from now on."""
    body = {"fault": fault, "count": 100_000}
    httpx.post(f"{engine.url}/inject_fault", json=body, timeout=30).raise_for_status()


def doctor(server: Running) -> tuple[int, dict[str, Any]]:
    """Run `doctor --live --json`; return its exit code and what it prints."""
    command = [sys.executable, "-m", "rollout_service.cli", "doctor", "--live", "--json", "--url", server.url]
    done = subprocess.run(
        [*command, "--state-dir", str(server.log_file.parent / "state")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def sections(report: dict[str, Any]) -> set[str]:
    """Return what a report names: parts of its view of the service, and kinds of findings that need somebody."""
    service = report["service"] or {}
    named = {part for part in ("reasons", "warnings", "engines", "errors", "holds") if service.get(part)}
    return named | {
        one["kind"]
        for one in report["findings"]
        if one["verdict"] in ("stuck", "idle") or one["kind"] in ("run", "weights")
    }


def is_well(server: Running) -> None:
    code, report = doctor(server)
    assert (code, sections(report)) == (0, set()), report


def names(server: Running, cause: str, *allowed: str, when: Callable[[], object] = lambda: None) -> None:
    """Check that the doctor and the dashboard name a cause in time, and that all the doctor names is of these parts."""
    deadline = time.monotonic() + NAMED_WITHIN
    while True:
        when()
        code, report = doctor(server)
        overview = server.get("/v1/overview")
        shown = cause in json.dumps([overview[part] for part in SHOWN])
        if code == 1 and cause in json.dumps(report) and shown:
            break
        assert time.monotonic() < deadline, (report, overview, server.log[-4_000:])
    assert sections(report) <= set(allowed), report


def readiness(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.ready().json()
    return found


def is_unready(server: Running, cause: str) -> None:
    found = readiness(server)
    assert not found["ready"]
    assert cause in " ".join(found["reasons"]), found


OUT = ("reasons", "engines", "engine", "paused_pool")
"""What is named if the only engine is out of service while rollouts wait for it."""


def test_an_engine_that_hangs(folder, engine):
    with service(folder, engine.url, CALM) as server:
        assert server.submit("r0", wait=60).json()["state"] == "completed"
        is_well(server)
        engine.stop(signal.SIGSTOP)
        server.submit("r1")
        names(server, "no backend is in service", *OUT)
        is_unready(server, "is failed")


def test_weights_that_are_not_finite(folder, engine):
    with service(folder, engine.url, CALM) as server:
        inject(engine, "bad_logprob")
        order = {"path": "/checkpoints/3", "version": 3}
        refused = httpx.post(f"{server.url}/v1/weights", json=order, timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_unusable")
        names(server, "version 3 of the weights from /checkpoints/3", *OUT)
        is_unready(server, "version 3 of the weights from /checkpoints/3")
        assert "weight update" in server.log


def test_an_engine_that_somebody_else_updates(folder, engine):
    with service(folder, engine.url, CALM) as server:
        httpx.post(f"{engine.url}/update_weight_version", json={"new_version": "77"}, timeout=30)
        assert server.submit("r1", wait=60).json()["state"] == "completed"
        names(server, "samples with version 77 of the weights, but was given version 0", "weights")
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
        [line] = [one for one in metrics.splitlines() if one.startswith("rollout_backend_other_version{")]
        assert line.endswith(" 1.0")
        assert "an engine samples with another version" in server.log


def written(folder: Path, toml: str) -> str:
    """Return the folder of an environment."""
    environment = folder / "own"
    environment.mkdir()
    (environment / "environment.toml").write_text(toml)
    return str(environment)


def test_a_grader_that_hangs(folder, engine):
    with service(folder, engine.url, CALM, "--environment", written(folder, HANGING)) as server:
        server.submit("r1", "hanging")
        names(server, "the grader of hanging runs", "grader")
        [wait] = [one for one in doctor(server)[1]["oldest"] if one["stage"] == "evaluate"]
        assert (wait["kind"], wait["name"], wait["rollout_id"]) == ("grader", "hanging", "r1")


@pytest.mark.apptainer
def test_a_sandbox_that_runs_out_of_memory(folder, engine):
    environment = written(folder, HUNGRY)
    with service(folder, engine.url, CALM, "--environment", environment, sandbox="apptainer") as server:
        assert server.submit("r1", "hungry", wait=60).json()["state"] == "failed"
        names(server, "the sandbox ran out of memory (64 MiB)", "errors")
        assert readiness(server)["ready"]


@pytest.mark.redis
def test_a_redis_that_is_gone(folder, engine, own_redis):
    with service(folder, engine.url, f'{CALM}[store]\nurl = "{own_redis.url}"\n') as server:
        own_redis.kill()
        names(server, "Redis", "reasons", "store")
        is_unready(server, "Redis")


def test_a_clock_that_jumps(folder, engine, monkeypatch):
    flag = folder / "jumped"
    (folder / "sitecustomize.py").write_text(CLOCK.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[3]}")
    with service(folder, engine.url, CALM) as server:
        flag.touch()
        done = server.submit("r1", wait=60).json()
        assert done["state"] == "completed"
        assert done["finished_at"] >= done["created_at"]
        assert all(span["queued_seconds"] < 60 for span in done["spans"])
        names(server, "the clock of this host jumped, and is 7200 s behind", "warnings")
        assert "the clock of this host jumped" in " ".join(readiness(server)["warnings"])
        assert "the clock jumped" in server.log
