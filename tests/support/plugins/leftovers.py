"""When a run of pytest-xdist ends in any way but by SIGKILL, no process that its tests started goes on.

An interrupted run gives its workers 10 s, which not all fixtures keep. Every process that a test starts inherits the
run's id in its environment, and is ended by it. A process with an environment of its own is not found.
"""

import signal
import sys
from contextlib import suppress

import psutil
import pytest

END_SECONDS = 10
"""How long processes have to end by themselves, and again after SIGTERM: guards are still at work."""
RUN_ID = "PYTEST_XDIST_TESTRUNUID"
"""The variable in which pytest-xdist tells its workers the id of their run."""

_RUN = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Let SIGTERM stop the run as SIGINT does: workers close their fixtures."""
    signal.signal(signal.SIGTERM, _interrupt)
    node.config.stash[_RUN] = node.workerinput["testrunuid"]


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends it twice
    raise KeyboardInterrupt


def pytest_unconfigure(config: pytest.Config) -> None:
    if run_id := config.stash.get(_RUN, None):
        end_processes(run_id)


def end_processes(run_id: str) -> None:
    """End all processes whose environment has a run's id."""
    _, left = psutil.wait_procs(_processes(run_id), END_SECONDS)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            sys.stderr.write(f"\na test left {process}; {end.__name__} it\n")
            with suppress(psutil.NoSuchProcess):
                end(process)
        _, left = psutil.wait_procs(left, END_SECONDS)


def _processes(run_id: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _has(process, run_id)]


def _has(process: psutil.Process, run_id: str) -> bool:
    try:
        return process.environ().get(RUN_ID) == run_id
    except psutil.Error:  # it ended, or belongs to another user
        return False
