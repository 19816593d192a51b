"""After kill -9 of a process that writes to its store, every write reported as durable is still there."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from api_schemas.rollouts import RolloutState
from rollout_service.base.errors import StoreError
from rollout_service.store.sqlite import SqliteStore
from rollout_service.store.sqlite.schema import Disk

WRITER = """
import itertools, os, sys
import anyio
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_service.store.sqlite import SqliteStore

def acknowledge(*words):
    os.write(1, (" ".join(words) + "\\n").encode())

async def submit(store, numbers):
    for number in numbers:
        request = RolloutRequest(rollout_id=f"r{number}", task=Task(environment="calc"))
        await store.submit(request)
        acknowledge("submitted", request.rollout_id)

async def finish(store):
    while True:
        for lease in await store.claim("worker", limit=8, lease_seconds=1000):
            await store.advance(lease, "worker", RolloutState.ROLLOUT)
            result = Rollout(rollout_id=lease.rollout_id, state="completed", reward=1.0, pool="policy",
                             task=lease.request.task, created_at=lease.created_at)
            assert await store.finish(lease, "worker", result)
            acknowledge("finished", lease.rollout_id)
        await store.wait_for_work()

async def main():
    first = int(sys.argv[2])
    numbers = itertools.count(first)
    async with await SqliteStore.open(sys.argv[1], disk=sys.argv[3]) as store:
        await store.recover("next")
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(submit, store, numbers)
            group.start_soon(finish, store)

anyio.run(main)
"""


def start_writer(path: Path, first: int, disk: Disk = "local") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), disk]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def write_until_killed(path: Path, first: int, acknowledgments: int, disk: Disk) -> list[tuple[str, str]]:
    """Kill a writer after so many acknowledgments, and return all that it received."""
    acknowledged: list[tuple[str, str]] = []
    with start_writer(path, first, disk) as writer:
        for line in writer.stdout or ():
            what, rollout_id = line.split()
            acknowledged.append((what, rollout_id))
            if len(acknowledged) == acknowledgments:
                writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    return acknowledged


@pytest.mark.parametrize("disk", ["local", "network"])
async def test_every_acknowledged_write_survives_kill_9(tmp_path, disk):
    path = tmp_path / "state" / "store.sqlite3"
    submitted: set[str] = set()
    finished: set[str] = set()
    for round_ in range(3):
        for what, rollout_id in write_until_killed(path, round_ * 1_000_000, 300, disk):
            (submitted if what == "submitted" else finished).add(rollout_id)
        async with await SqliteStore.open(path, disk=disk) as store:
            for rollout_id in submitted | finished:
                rollout = await store.get(rollout_id)
                assert rollout is not None
                if rollout_id in finished:
                    assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, 1.0)
            events = await store.events(after=0, limit=10**6)
            assert [event.event_id for event in events] == list(range(1, len(events) + 1))
            ends = Counter(event.subject for event in events if event.data["state"] == "completed")
            assert set(ends.values()) <= {1}
            assert set(ends) >= finished
    assert finished


async def test_two_processes_never_share_a_file(tmp_path):
    path = tmp_path / "store.sqlite3"
    with start_writer(path, 0) as writer:
        try:
            assert writer.stdout.readline()
            with pytest.raises(StoreError, match=f"pid {writer.pid}") as caught:
                await SqliteStore.open(path)
            assert "Stop that service" in caught.value.hint
        finally:
            writer.kill()
    async with await SqliteStore.open(path) as store:
        assert sum((await store.counts()).values()) >= 1
