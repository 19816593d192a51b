"""The persistent bash session: an interactive bash without a terminal, one command at a time.

Each command is sent as one quoted `eval` and a line that reports its exit code, under a nonce, on a pipe of
its own which the command does not have. So output cannot be taken for a result, a process in the background
that holds the output open delays nothing, and after an interrupt the shell still reports, once nothing of the
command runs any more. Interactive, since then SIGINT and an unset variable end the command and not the shell.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import anyio

from sandboxes.contract import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, BashResult, BashSession
from sandboxes.errors import SandboxClosedError, SandboxError, SessionDiedError
from sandboxes.limits.violations import LimitViolations
from sandboxes.runtime.control import Child, ControlShell, ticks_now
from sandboxes.runtime.output import OutputBuffer
from sandboxes.runtime.pipes import ERROR, FIRST_LOOK, INPUT, Reader, count_pending, write_all
from sandboxes.sessions.bash_protocol import SETUP, frame_command, frame_report
from sandboxes.sessions.restart_limit import restart_limiter

ARGV = ("bash", "--norc", "--noprofile", "--noediting", "-i")
ENV = {"PS1": "", "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}
JOBS_LIMIT = 1024
PID_DIGITS = 10
INTERRUPTS = (("INT", 1.0),) * 10
"""SIGINT is lost on a process that the shell has forked and that is not its program yet, so it is sent again."""
STEPS = (("INT", 1.0), ("INT", 1.0), ("TERM", 1.0), ("KILL", 1.0))
"""What a command gets at its time-out, and how long it may take to heed it."""
NUDGE_PAUSE = 0.03
"""A shell drops SIGINT while it waits for a program that ends by itself, so it is sent to the shell again and again.
Else a loop over short programs would hardly ever end. A shell whose program takes longer does not mind."""
TRIES = 20
"""To find a program of a loop running, where the first signals did not end the loop."""
QUESTIONS, QUESTION_PAUSE = 10, 1.0
"""How often, in seconds, an interrupted shell is asked whether it is ready."""
LOOKS = 50
"""At a shell that still reads its command."""


class _Command(NamedTuple):
    nonce: str
    since: int
    """When it began, in ticks."""


class ShellSession(BashSession):
    """A bash inside of a sandbox, started at its first command and again after it has died."""

    def __init__(
        self,
        control: ControlShell,
        *,
        cwd: str,
        env: dict[str, str],
        violations: LimitViolations,
        explain: Callable[[SessionDiedError], Awaitable[SandboxError]],
    ) -> None:
        """`explain` turns a death into its cause where the sandbox knows one, such as its memory limit."""
        self._control = control
        self._cwd = cwd
        self._env = {**env, **ENV}
        self._violations = violations
        self._explain = explain
        self._lock = asyncio.Lock()  # each turn takes it, and anyio's costs as much as the rest of the call
        self._restarts = restart_limiter()
        self._child: Child | None = None
        self._reader: Reader | None = None
        self._jobs: list[int] = []
        """What ran in the background when the present command began."""
        self._running: _Command | None = None
        self._interrupt_done: anyio.Event | None = None
        """The end of the present command, where somebody wants it interrupted."""

    async def open(self) -> None:
        """Start the shell if there is none.

        Raises:
            SandboxClosedError, SandboxStartError: as `ControlShell.spawn`.
            SessionDiedError: the one that there was ended since its last command.
        """
        if self._child is not None:
            if not self._child.status.ended:
                return
            self.discard()
            raise await self._explain(SessionDiedError("the shell ended after its last command"))
        await self._restarts.take()
        child = await self._control.spawn("session", ARGV, cwd=self._cwd, env=self._env)
        child.pipes.close(ERROR)  # the shell's own complaints go nowhere, its commands' to the output
        self._child, self._reader = child, Reader(child.stdout)
        await write_all(child.pipes.fds[INPUT], SETUP)

    async def run(
        self, command: str, *, timeout: float = DEFAULT_TIMEOUT, output_limit: int = DEFAULT_OUTPUT_LIMIT
    ) -> BashResult:
        if "\0" in command or timeout <= 0 or output_limit <= 0:
            raise ValueError("a command has no NUL characters, and its limits are positive")
        async with self._lock:
            await self.open()
            output = OutputBuffer(output_limit)
            try:
                return await self._run(command, timeout, output)
            except BaseException:
                self.discard()  # cancelled or dead: what it was doing must not go on under the next command
                raise

    async def _run(self, command: str, timeout: float, output: OutputBuffer) -> BashResult:
        child, reader = self._require_open()
        begun, until = time.monotonic(), asyncio.get_running_loop().time() + timeout
        this = self._running = _Command(os.urandom(8).hex(), ticks_now())
        self._jobs = []
        reader.start(output.add)
        try:
            code = await self._run_to_code(child, this, frame_command(command, this.nonce), until)
            if code is None or self._interrupt_done is not None:
                await self._settle(child)
        except SessionDiedError as error:
            reader.stop()
            error.output = output.text()
            raise await self._explain(error) from None
        finally:
            self._running = None
            if self._interrupt_done is not None:
                self._interrupt_done.set()
                self._interrupt_done = None
            reader.stop()
        seconds, timed_out = time.monotonic() - begun, code is None
        violations = self._violations.drain_with_call(
            timeout if timed_out else None, output.limit if output.truncated else None
        )
        return BashResult(output.text(), code, timed_out, output.truncated, seconds, violations)

    def _require_open(self) -> tuple[Child, Reader]:
        if self._child is None or self._reader is None:
            raise SessionDiedError("the shell ended before the command ran")
        return self._child, self._reader

    async def _run_to_code(self, child: Child, this: _Command, frame: bytes, until: float) -> int | None:
        """Have it run; its exit code, or None where its time-out ended it."""
        with suppress(TimeoutError):
            await write_all(child.pipes.fds[INPUT], frame, until)
            return await self._read_report(child, this.nonce, until, heeds=True)
        if self._interrupt_done is not None:
            if (code := await self._stop(child, this, INTERRUPTS, until)) is not None:
                return code
            with suppress(TimeoutError):
                return await self._read_report(child, this.nonce, until)
        if await self._stop(child, this, STEPS) is None:
            raise SessionDiedError(
                "the command ran into its time-out and nothing less than its shell's end stopped it",
                timed_out=True,
            )
        return None

    async def _stop(
        self, child: Child, this: _Command, steps: Iterable[tuple[str, float]], until: float = math.inf
    ) -> int | None:
        """The exit code after one of the signals, each with so many seconds to heed it; None where it goes on."""
        for _ in range(LOOKS):
            await anyio.sleep(FIRST_LOOK)
            # A shell that is interrupted while it reads would take the rest for another command.
            if child.stdin is None or not count_pending(child.stdin):
                break
        now = asyncio.get_running_loop().time
        for number, (name, grace) in enumerate(steps):
            await self._control.stop(child.group, name, this.since, self._jobs, TRIES if number else 1)
            end, asks = min(until, now() + grace), False
            while now() < end:
                with suppress(TimeoutError):
                    return await self._read_report(child, this.nonce, min(end, now() + NUDGE_PAUSE))
                if asks:  # the report may be what was interrupted
                    self._ask(child, this.nonce)
                else:
                    await self._control.interrupt(child.group)
                asks = not asks
        return None

    async def _settle(self, child: Child) -> None:
        """Wait until no interrupt is under way any more, which would end the next command."""
        await self._control.wait_until_done()
        for _ in range(QUESTIONS):
            nonce = os.urandom(8).hex()
            self._ask(child, nonce)
            with suppress(TimeoutError):
                await self._read_report(child, nonce, asyncio.get_running_loop().time() + QUESTION_PAUSE)
                return
        raise SessionDiedError("the shell did not come to rest after it was interrupted")

    @staticmethod
    def _ask(child: Child, nonce: str) -> None:
        """Have the shell report once more, if it still reads."""
        if child.stdin is not None:
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(child.stdin, frame_report(nonce))

    async def interrupt(self) -> None:
        if not self._control.alive:
            raise SandboxClosedError("the sandbox has ended")
        if self._child is None or self._running is None:
            return
        wanted = self._interrupt_done = self._interrupt_done or anyio.Event()
        self._child.status.expire()
        with anyio.move_on_after(sum(seconds for _, seconds in INTERRUPTS)):
            await wanted.wait()

    async def ensure_open(self) -> None:
        """Start the shell at the first call; `run` says where it has ended since, and starts others."""
        if self._child is None:
            async with self._lock:
                if self._child is None:
                    await self.open()

    @property
    def is_open(self) -> bool:
        """Whether there is a shell, which may have ended."""
        return self._child is not None

    @property
    def healthy(self) -> bool:
        """Whether the shell runs, or has not been opened."""
        return self._child is None or not self._child.status.ended

    async def wait_until_idle(self) -> None:
        """Wait until no command runs."""
        async with self._lock:
            pass

    async def _read_report(
        self, child: Child, nonce: str, until: float | None = None, *, heeds: bool = False
    ) -> int:
        """Wait for the report of a command; the one before has named the jobs.

        Raises:
            TimeoutError: it has not come `until` then; or, where it `heeds` that, an interrupt is wanted.
            SessionDiedError: the shell has ended.
        """
        while not (heeds and self._interrupt_done is not None):
            line = await child.status.next(until)
            if line is None:
                raise SessionDiedError("the shell ended while the command ran")
            found, _, code = line.partition(" ")
            if found == nonce and code.isdigit():
                return int(code)
            if found.isdigit() and len(found) < PID_DIGITS and len(self._jobs) < JOBS_LIMIT:
                self._jobs.append(int(found))
        raise TimeoutError

    async def restart(self) -> None:
        async with self._lock:
            self.discard()
            await self.open()

    def discard(self) -> None:
        """Kill the shell and its process group, without waiting. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        if self._child is not None:
            self._child.discard()
        self._child = self._reader = None
