"""Processes are identified by marks, pid and start time, and killed only if they are the right ones."""

import os
import subprocess
import sys

from sandboxes.host.processes import (
    FOLDERS,
    MARKER,
    find_processes,
    kill_if,
    kill_processes,
    processes_of,
    sandbox_of,
    start_time,
    work_of,
)
from tests.support.processes.children import STUBBORN, killed, started

WORKER = """
import subprocess, sys, time
code = "import time\\nwhile time.process_time() < 0.2: open('/dev/zero', 'rb').read(9_000)\\nprint(flush=True); input()"
with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE):
    time.sleep(60)
"""


def test_start_time_tells_processes_apart():
    with started(STUBBORN) as process:
        found = start_time(process.pid)
        assert found >= (start_time(os.getpid()) or 0)
    assert start_time(process.pid) is None


def test_marks_and_kills_only_what_matches():
    with started(STUBBORN, **{MARKER: "some-id"}) as process:
        assert sandbox_of(process.pid) == "some-id"
        assert processes_of({"some-id"}) == [process.pid]
        assert not kill_if(process.pid, lambda pid: False)
        assert process.poll() is None
        assert kill_if(process.pid, lambda pid: sandbox_of(pid) == "some-id")
        assert process.wait() == -9
        assert not kill_if(process.pid, lambda pid: True)


def test_kills_by_service_and_spares_the_neighbor():
    with (
        started(STUBBORN, **{MARKER: "0a0a0a0a-12"}) as mine,
        started(STUBBORN, **{MARKER: "0a0a0a0b-12"}) as neighbor,
    ):
        assert find_processes(lambda mark: mark.startswith("0a0a0a0a-")) == [mine.pid]
        assert kill_processes(lambda mark: mark.startswith("0a0a0a0a-")) == 1
        assert mine.wait() == -9
        assert neighbor.poll() is None


def test_a_process_is_found_though_it_was_seen_before_it_became_a_launcher():
    launcher = f"[sys.executable, '-c', {STUBBORN!r}]"
    code = f"import os, sys; print(flush=True); input(); os.execve(sys.executable, {launcher}, {{'{MARKER}': 'late'}})"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with killed(subprocess.Popen(command, stdin=pipe, stdout=pipe)) as process:
        process.stdout.readline()
        assert processes_of({"late"}) == []
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert processes_of({"late"}) == [process.pid]
        assert processes_of({"late"}) == [process.pid]  # now from memory


def test_ended_processes_belong_to_no_sandbox():
    assert sandbox_of(2**22 + 1) is None


def test_a_sandbox_is_recognized_by_its_mounts():
    line = b"36 35 0:20 /rs-0/0a1b2c3d/17/pipes /run/rollout/pipes ro,nosuid - tmpfs tmpfs rw"
    found = FOLDERS.search(line)
    assert found.groups() == (b"0a1b2c3d", b"17")
    for other in (b"/rs-0/0a1b2c3d4/17/pipes", b"/overlay2/0a1b2c3d/x/overlay", b"/0a1b2c3d/17/pipesx "):
        assert FOLDERS.search(other) is None


def test_work_is_that_of_a_process_and_of_all_below_it():
    with started(WORKER) as process:
        all_work, own = work_of(process.pid, 10), work_of(process.pid, 0)
        assert all_work.cpu_seconds - own.cpu_seconds >= 0.15
        assert all_work.bytes - own.bytes >= 9_000
        assert work_of(process.pid, 10).cpu_seconds >= all_work.cpu_seconds
    assert work_of(process.pid, 10).cpu_seconds == 0
