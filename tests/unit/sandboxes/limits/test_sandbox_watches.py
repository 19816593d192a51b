"""The number of epoll watches that a process can have is estimated from outside, with a bound for all sandboxes."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from sandboxes.limits.watchdog import exceeds, watches_per_sandbox

HOLDER = """
import ctypes, os, select, sys
held = [select.epoll() for _ in range(int(sys.argv[1]))] + [os.dup(0) for _ in range(int(sys.argv[2]))]
if len(sys.argv) > 3: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, *request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.mark.parametrize("holder", [["100", "200"]], indirect=True)
def test_instances_times_descriptors(holder):
    assert not exceeds([holder.pid], 100 * 320)
    assert exceeds([holder.pid], 20_000)
    assert exceeds([holder.pid, holder.pid], 40_000), "of all together"


@pytest.mark.parametrize("holder", [["3", "20"], ["0", "400"]], indirect=True)
def test_ordinary_programs_have_almost_none(holder):
    assert not exceeds([holder.pid], 3 * 50)


@pytest.mark.parametrize("holder", [["100", "200", "hidden"]], indirect=True)
def test_a_process_that_cannot_be_inspected_counts_with_its_maximum(holder):
    assert exceeds([holder.pid], 20_000)


def test_an_ended_process_exceeds_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not exceeds([process.pid], 0)


def test_all_sandboxes_together_leave_half():
    one = watches_per_sandbox(1)
    assert one is not None
    assert watches_per_sandbox(10) == pytest.approx(one / 10, abs=1)
    assert watches_per_sandbox(0) == one
