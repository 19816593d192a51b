"""Host processes: known by number and start time, ended with patience, killed only if they are the right ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandboxes.process import (
    MARKER,
    end_process,
    kill_if,
    marked_processes,
    marked_with,
    start_time,
    wait_exit,
)

pytestmark = pytest.mark.anyio
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def start(code: str, **env: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, **env}
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    process = start(STUBBORN)
    begun = time.monotonic()
    assert await end_process(process, grace=0.1, kill_wait=4.0)
    assert process.returncode == -9
    assert time.monotonic() - begun < 10


async def test_a_process_that_ends_by_itself_is_left_to() -> None:
    process = start("print(flush=True)")
    assert await end_process(process, grace=10, kill_wait=1)
    assert process.returncode == 0
    assert await wait_exit(process, 0)


async def test_waiting_is_bounded() -> None:
    process = start(STUBBORN)
    assert not await wait_exit(process, 0.05)
    process.kill()
    assert await wait_exit(process, 10)


def test_start_time_tells_processes_apart() -> None:
    process = start(STUBBORN)
    found = start_time(process.pid)
    assert found is not None
    assert found >= (start_time(os.getpid()) or 0)
    process.kill()
    process.wait()
    assert start_time(process.pid) is None


def test_marks_and_kills_only_what_matches() -> None:
    process = start(STUBBORN, **{MARKER: "some-id"})
    assert marked_with(process.pid) == "some-id"
    assert marked_processes({"some-id"}) == [process.pid]
    assert not kill_if(process.pid, lambda pid: False)
    assert process.poll() is None
    assert kill_if(process.pid, lambda pid: marked_with(pid) == "some-id")
    assert process.wait() == -9
    assert not kill_if(process.pid, lambda pid: True)


def test_unreadable_processes_are_not_ours(tmp_path: Path) -> None:
    assert marked_with(2**22 + 1) is None
