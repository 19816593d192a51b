"""Children of this process, and how they end: ask, wait, kill, wait again for a bounded time."""

import os
import subprocess

import anyio


async def wait_exit(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for a child of this process and collect it; False where it still runs after `timeout` seconds."""
    if process.poll() is not None:
        return True
    fd = os.pidfd_open(process.pid)
    try:
        with anyio.move_on_after(timeout):
            await anyio.wait_readable(fd)
    finally:
        os.close(fd)
    return process.poll() is not None


async def end_process(process: subprocess.Popen[bytes], *, grace: float, kill_wait: float) -> bool:
    """Wait `grace` seconds for a child that knows it should end, terminate, kill; whether it is gone."""
    for act in (None, process.terminate, process.kill):
        if act is not None:
            act()
        if await wait_exit(process, grace if act is None else kill_wait / 2):
            return True
    return False
