"""Children are ended with patience."""

import subprocess
import sys
import time

import pytest

from sandboxes.children import end_process, wait_exit

pytestmark = pytest.mark.anyio
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def start(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
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
