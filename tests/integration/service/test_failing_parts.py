"""A running service survives broken parts where it can, and otherwise ends with the reason."""

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import anyio
import httpx
import pytest

from rollout_service.base.errors import StoreError
from rollout_service.http.drain import FAILED
from rollout_service.store.sqlite.thread import DatabaseThread
from tests.support.processes.service import Running, scripted_engine, service

READING_SECONDS = 2.5
"""Time for at least two readings of the host's pressure, which is read every second."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_engine(tmp_path_factory.mktemp("engine"), delay=0) as started:
        yield started.url


def completes(server: Running, rollout_id: str) -> bool:
    return bool(server.submit(rollout_id, wait=30).json()["state"] == "completed")


def test_a_run_folder_that_is_removed(folder, engine):
    (folder / "run").mkdir(mode=0o711)
    with service(folder, engine, f'[sandbox]\nprovider = "local"\nrun_dir = "{folder / "run"}"\n') as server:
        assert completes(server, "before")
        shutil.rmtree(folder / "run")
        time.sleep(READING_SECONDS)
        assert completes(server, "after"), server.log
        assert server.process.poll() is None
        assert server.ready().is_success


def test_a_state_folder_that_is_renamed(folder, engine):
    with service(folder, engine) as server:
        assert completes(server, "before")
        (folder / "state").rename(folder / "elsewhere")
        time.sleep(READING_SECONDS)
        refused = server.submit("after", wait=30)
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        not_ready = server.ready()
        assert (not_ready.status_code, "Move it back" in not_ready.text) == (503, True), not_ready.text
        httpx.post(f"{server.url}/v1/backends", json={"url": engine}).raise_for_status()
        assert "the backends cannot be remembered" in server.log
        (folder / "elsewhere").rename(folder / "state")
        server.wait_until_ready()
        assert completes(server, "after"), server.log


NO_DESCRIPTORS = """
import os, resource
from sandboxes.scheduling.host_metrics import HostReader
reader = HostReader()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.open("/", os.O_PATH)
except OSError:
    print(reader.read().descriptors_free)
"""


def test_no_descriptors_are_a_reading(tmp_path):
    done = subprocess.run([sys.executable, "-c", NO_DESCRIPTORS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_a_part_that_fails_ends_the_process_with_its_reason(folder, engine):
    """Damage a run's row; the task that works on all runs then fails on it."""
    run = {
        "run_id": "damaged",
        "source": {
            "kind": "inline",
            "tasks": [{"environment": "echo", "instance": {"number": 1}}],
            "open": True,
        },
        "group_size": 1,
        "batch_size": 1,
    }
    with service(folder, engine, "[pipeline]\ndrain_seconds = 1\n") as server:
        httpx.post(f"{server.url}/v1/runs", json=run).raise_for_status()
        with closing(sqlite3.connect(folder / "state" / "rollouts.sqlite3", timeout=10)) as database, database:
            assert database.execute("UPDATE runs SET request = '{'").rowcount == 1
        assert server.ended(30) == FAILED
        reasons = [line for line in server.log.splitlines() if "a part of the service failed; shutting down" in line]
        assert len(reasons) == 1, server.log
        assert "ValidationError" in reasons[0]


async def test_a_thread_of_the_store_that_fails_is_seen():
    thread = DatabaseThread(":memory:", lambda _: None)
    await thread.start()

    def fail(_: sqlite3.Connection) -> None:
        raise SystemExit("a defect")

    with anyio.fail_after(10):
        with pytest.raises(StoreError, match="a defect"):
            await thread.write(fail)
        with pytest.raises(StoreError, match="a defect"):
            await thread.failed()
        with pytest.raises(StoreError, match="a defect"):
            await thread.read(lambda _: None)
        await thread.close()
