"""Processes of the host: who they are beyond a number that is used again, and how they end.

Ending is: ask, wait, kill, wait again for a bounded time. Signals go through a pidfd, which cannot hit another
process that got the same number. Nothing here finds a process by its name.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio

MARKER = "ROLLOUT_SANDBOX"
"""The environment variable that says to which sandbox a process belongs."""


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot: with its number and `boot_id` it is unique. None: it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Changes with every boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def marked_with(pid: int) -> str | None:
    """The sandbox that the process was started for, by its environment; None for none or one we may not read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{MARKER}=".encode()
    return next(
        (entry[len(prefix) :].decode(errors="replace") for entry in entries if entry.startswith(prefix)), None
    )


def marked_processes(ids: set[str]) -> list[int]:
    """The processes of these sandboxes. It reads all of /proc: call it in a thread."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if marked_with(pid) in ids]


def kill_if(pid: int, is_it: Callable[[int], bool]) -> bool:
    """SIGKILL a process if `is_it` still holds once the number can no longer change its meaning."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_it(pid):
            return False
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(fd)


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
