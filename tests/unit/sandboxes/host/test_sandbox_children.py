"""Children are asked to end, then killed, within a bounded time."""

import os
import signal
import time

import pytest

from sandboxes.host.children import ForkedChild, LingeringChildren, end_process, wait_exit
from tests.support.processes.children import STUBBORN, held, started


@pytest.mark.slow
async def test_a_process_that_ignores_sigterm_is_killed():
    with started(STUBBORN) as process:
        begun = time.monotonic()
        assert await end_process(process, grace=0.1, kill_wait=4.0)
        assert process.returncode == -9
        assert time.monotonic() - begun < 10


async def test_a_process_that_ends_by_itself_gets_no_signal():
    with started("print(flush=True)") as process:
        assert await end_process(process, grace=10, kill_wait=1)
        assert process.returncode == 0
        assert await wait_exit(process, 0)


async def test_waiting_is_bounded():
    with started(STUBBORN) as process:
        assert not await wait_exit(process, 0.05)
        process.kill()
        assert await wait_exit(process, 10)


async def test_a_child_that_outlives_its_kill_is_kept_and_finished_once():
    lingering, finished = LingeringChildren(), []
    with started(STUBBORN) as process:
        with held(process.pid):
            assert not await end_process(process, grace=0, kill_wait=0.2)
            lingering.keep(process, lambda: finished.append(process.pid))
            await lingering.wait(0.1)
            assert (len(lingering), finished) == (1, [])
        await lingering.wait(10)
        await lingering.collect()
        assert (len(lingering), finished) == (0, [process.pid])


def test_a_child_that_another_process_made_is_collected_once():
    child = ForkedChild(os.posix_spawn("/bin/sleep", ["sleep", "60"], {}))
    assert child.poll() is None
    child.terminate()
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGTERM
    assert child.poll() == -signal.SIGTERM
    child.kill()  # which hits no other process that has its pid by now
    assert child.poll() == -signal.SIGTERM


def test_a_child_that_others_have_collected_has_ended():
    child = ForkedChild(os.posix_spawn("/bin/false", ["false"], {}))
    os.waitpid(child.pid, 0)
    child.kill()
    assert child.poll() == 0, "its exit code is lost"
