"""Children of this process: how they start and end.

A child may outlive that: the kernel can hold a killed process for as long as it needs, and on a busy machine all
processes end late. Such a child is kept and collected whenever it ends.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import anyio
import anyio.to_thread
import structlog
from anyio.abc import Process

log = structlog.get_logger(__name__)

PAUSE = 0.05


async def start_process(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    new_session: bool = False,
) -> Process:
    """Start a child process, shielded: a start that is cancelled halfway would lose the process.

    Without `env` it has this process's variables. A standard stream is inherited unless one is given.

    Raises:
        OSError: The program cannot be started.
    """
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=new_session,
        )
    return process  # noqa: RET504  to mypy, a cancel scope may swallow what its block returns


class ChildProcess(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Collect the child if it has ended; return its exit code, or None if it still runs."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkedChild:
    """A child of this process that another one made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            return self._collect()

    def _collect(self) -> int | None:
        if self._exit_code is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # others have collected it, or this process ignores SIGCHLD: as `Popen` has it
                ended, status = self.pid, 0
            self._exit_code = os.waitstatus_to_exitcode(status) if ended else None
        return self._exit_code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with self._lock:
            if self._collect() is None:  # until it is collected, its pid is no other process's
                os.kill(self.pid, number)


async def wait_exit(process: ChildProcess, timeout: float) -> bool:
    """Wait for a child; return False if it still runs after `timeout` seconds."""
    if process.poll() is not None:
        return True
    fd = os.pidfd_open(process.pid)
    try:
        with anyio.move_on_after(timeout):
            await anyio.wait_readable(fd)
    finally:
        os.close(fd)
    return process.poll() is not None


async def end_process(process: ChildProcess, *, grace: float, kill_wait: float) -> bool:
    """Give a child `grace` seconds to end by itself, then terminate and kill it; return whether it has ended."""
    for act in (None, process.terminate, process.kill):
        if act is not None:
            act()
        if await wait_exit(process, grace if act is None else kill_wait / 2):
            return True
    return False


class _Kept(NamedTuple):
    process: ChildProcess
    finish: Callable[[], None] | None


class LingeringChildren:
    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        """Include those that ended since the last `collect`."""
        return len(self._kept)

    def keep(self, process: ChildProcess, finish: Callable[[], None] | None = None) -> None:
        """Keep a child until it can be collected; `finish` is then called in a thread."""
        log.warning("a process was killed and has not ended yet", pid=process.pid)
        self._kept.append(_Kept(process, finish))

    async def collect(self) -> None:
        ended = [kept for kept in self._kept if kept.process.poll() is not None]
        self._kept = [kept for kept in self._kept if kept not in ended]
        for kept in ended:
            log.info("a process that was killed has ended", pid=kept.process.pid)
            if kept.finish is not None:
                await anyio.to_thread.run_sync(kept.finish)

    async def wait(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self.collect()
            while self._kept:
                await anyio.sleep(PAUSE)
                await self.collect()
        for kept in self._kept:
            log.error(
                "a process that was killed outlives its service",
                pid=kept.process.pid,
                hint=f"the kernel holds it: see /proc/{kept.process.pid}/stack",
            )
