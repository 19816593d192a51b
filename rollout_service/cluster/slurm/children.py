"""Children of a job's processes: started again when they die, and ended with the process that started them.

When `keep_running` returns or is cancelled, the child has ended. It was asked, by SIGTERM or by the end of its input,
and killed after its grace.

Tasks of Slurm are asked by the end of their input. Slurm hands a signal to every process of a step: to the service, its
guard and the processes of its sandboxes, which would all die at once. The end of the input reaches the task alone, and
comes too if the job's batch step is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from anyio.abc import Process

from sandboxes.host.children import start_process

log = structlog.get_logger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
TERM_SECONDS = 10.0
"""How long a child that the end of its input did not end may take after SIGTERM before it is killed."""
SETTLED_SECONDS = 60.0
"""A child that ran this long is started again at once."""
ENDED_BY_SLURM = 75
"""The exit code of a task that Slurm asked to end. `srun` itself returns 0 when it has lost its node."""
ENGINE_GIVEN_UP = 70
"""The exit code of a task whose engine cannot start. `srun` returns the highest code of its tasks."""
_CHUNK_BYTES = 4_096


def pause_after(failed: int) -> float:
    """Return the pause in seconds after this many failures in a row: it doubles each time, up to a limit."""
    doublings = min(max(0, failed - 1), 10)  # a large power is no float
    return min(FIRST_PAUSE_SECONDS * (1 << doublings), LONGEST_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class KeptProcess:
    name: str
    command: Sequence[str]
    log: Path
    grace_seconds: float
    """How long it may take to end once it is asked to."""
    environment: Mapping[str, str] | None = None
    ends_with_input: bool = False
    """Whether the end of its input asks it to end, and not SIGTERM: after that, `srun` kills its tasks at once."""
    final_codes: frozenset[int] = frozenset({0})
    """It is not started again after these exit codes."""
    before_restart: Callable[[], None] | None = None
    """Called in a thread each time before it is started again."""
    stopping: anyio.Event = field(default_factory=anyio.Event)

    async def keep_running(self) -> int | None:
        """Run until `stopping` is set, and return None; return the exit code of an end that is final.

        Raises:
            OSError: The program cannot be started.
        """
        failed = 0
        while not self.stopping.is_set():
            began = anyio.current_time()
            code = await self.run_once()
            if self.stopping.is_set():
                break
            if code in self.final_codes:
                return code
            failed = 1 if anyio.current_time() - began > SETTLED_SECONDS else failed + 1
            pause = pause_after(failed)
            log.warning("part of the job ended", part=self.name, exit_code=code, again_in_seconds=pause)
            with anyio.move_on_after(pause):
                await self.stopping.wait()
            if self.before_restart is not None:
                await anyio.to_thread.run_sync(self.before_restart)
        return None

    async def run_once(self) -> int:
        """Run to its end, or until `stopping` is set; return its exit code.

        Raises:
            OSError: The program cannot be started.
        """
        with self.log.open("ab") as output:
            process = await start_process(
                self.command,
                stdin=subprocess.PIPE if self.ends_with_input else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                new_session=True,
            )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_when_stopping, process)
                code = await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            await self._end(process)
        return code

    async def _end_when_stopping(self, process: Process) -> None:
        await self.stopping.wait()
        await self._end(process)

    async def _end(self, process: Process) -> None:
        """Ask, wait, kill; shielded and idempotent. SIGTERM asks, or follows the end of the input."""
        with anyio.CancelScope(shield=True):
            seconds = self.grace_seconds
            if process.stdin is not None:
                await process.stdin.aclose()
                await _wait(process, seconds)
                seconds = TERM_SECONDS
            if process.returncode is None:
                process.terminate()
                await _wait(process, seconds)
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _wait(process: Process, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await process.wait()


@dataclass
class EndRequests:
    part: str
    stopping: anyio.Event = field(default_factory=anyio.Event)
    """Set at the first request; more requests change nothing."""
    exit_code: int = 0
    """The exit code after an end in order."""

    async def follow(self) -> None:
        """Set `stopping` when this task's input ends, or after SIGTERM or SIGINT."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_input)
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for number in signals:
                    self._end(number.name, ENDED_BY_SLURM)

    async def _follow_input(self) -> None:
        descriptor = sys.__stdin__.fileno() if sys.__stdin__ else 0
        while True:
            await anyio.wait_readable(descriptor)
            if not os.read(descriptor, _CHUNK_BYTES):
                break
        self._end("its input has ended", 0)

    def _end(self, reason: str, exit_code: int) -> None:
        if not self.stopping.is_set():
            log.info("this part ends", part=self.part, reason=reason)
            self.exit_code = exit_code
            self.stopping.set()
