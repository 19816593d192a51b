"""Processes that tests left are ended with their run, and no others."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.plugins import leftovers

STUBBORN = (
    "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('ready', flush=True); time.sleep(99)"
)


@pytest.mark.slow
def test_processes_of_a_run_are_ended_with_it_and_no_others(monkeypatch):
    monkeypatch.setattr(leftovers, "END_SECONDS", 0.5)

    def start(run_id: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {leftovers.RUN_ID: run_id}
        command = [sys.executable, "-c", STUBBORN]
        process = stack.enter_context(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    with ExitStack() as stack:
        left, other = start("this run"), start("another run")
        leftovers.end_processes("this run")
        assert left.poll() is not None
        assert other.poll() is None
