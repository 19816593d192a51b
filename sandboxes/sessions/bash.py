"""The persistent bash session: an interactive bash without a terminal that runs one command at a time.

Each command is sent as one quoted `eval`, followed by a line that reports its exit code. The report carries a nonce
and goes through a pipe that the command does not have. Therefore:

- output is never mistaken for a report;
- a background process that keeps the output open delays nothing;
- after an interrupt the shell still reports, once nothing of the command runs any more (see `interrupts`).

The shell is interactive, so SIGINT and an unset variable end the command and not the shell.
"""

import asyncio
import time
from contextlib import suppress

from sandboxes.contract import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, BashResult, BashSession
from sandboxes.errors import SandboxClosedError, SessionDiedError
from sandboxes.runtime.control import Child, ControlShell
from sandboxes.runtime.output import OutputBuffer
from sandboxes.runtime.pipes import ERROR, INPUT, Reader, write_all
from sandboxes.sessions.bash_protocol import SETUP, frame_command
from sandboxes.sessions.interrupts import Interrupter, ShellCommand
from sandboxes.sessions.serial_session import SerialSession

ARGV = ("bash", "--norc", "--noprofile", "--noediting", "-i")
ENV = {"PS1": "", "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}


class _Shell:
    """One bash process, with the parts that talk to it."""

    __slots__ = ("child", "interrupter", "reader")

    def __init__(self, control: ControlShell, child: Child) -> None:
        self.child = child
        self.reader = Reader(child.stdout)
        self.interrupter = Interrupter(control, child)

    @property
    def has_ended(self) -> bool:
        """Whether the shell is known to have ended."""
        return self.child.status.ended

    def discard(self) -> None:
        """Kill the process group, without waiting. Idempotent."""
        self.reader.close()
        self.child.discard()


class ShellSession(SerialSession[_Shell], BashSession):
    """A bash inside a sandbox, started at its first command and again after it has died."""

    _death_message = "the shell ended after its last command"

    async def _start(self) -> None:
        child = await self._control.spawn("session", ARGV, cwd=self._cwd, env={**self._env, **ENV})
        child.pipes.close(ERROR)  # the shell's own complaints go nowhere, its commands' to the output
        self._process = _Shell(self._control, child)
        await write_all(child.pipes.fds[INPUT], SETUP)

    async def run(
        self, command: str, *, timeout: float = DEFAULT_TIMEOUT, output_limit: int = DEFAULT_OUTPUT_LIMIT
    ) -> BashResult:
        if "\0" in command:
            raise ValueError("a command must not contain NUL characters")
        if timeout <= 0 or output_limit <= 0:
            raise ValueError("timeout and output_limit must be positive")
        async with self._lock:
            await self.open()
            output = OutputBuffer(output_limit)
            try:
                return await self._run(command, timeout, output)
            except BaseException:
                self.discard()  # cancelled or dead: its work must not continue under the next command
                raise

    async def _run(self, command: str, timeout: float, output: OutputBuffer) -> BashResult:
        if (shell := self._process) is None:
            raise SessionDiedError("the shell ended before the command ran")
        started, until = time.monotonic(), asyncio.get_running_loop().time() + timeout
        running = shell.interrupter.begin()
        shell.reader.start(output.add)
        try:
            code = await self._run_to_code(shell, running, command, until)
            if code is None or shell.interrupter.is_requested:
                await shell.interrupter.settle()
        except SessionDiedError as error:
            shell.reader.stop()
            error.output = output.text()
            raise await self._explain(error) from None
        finally:
            shell.interrupter.end()
            shell.reader.stop()
        seconds, timed_out = time.monotonic() - started, code is None
        violations = self._violations.drain_with_call(
            timeout if timed_out else None, output.limit if output.truncated else None
        )
        return BashResult(output.text(), code, timed_out, output.truncated, seconds, violations)

    @staticmethod
    async def _run_to_code(shell: _Shell, running: ShellCommand, command: str, until: float) -> int | None:
        """Run the command; return its exit code, or None if its timeout ended it."""
        interrupter = shell.interrupter
        with suppress(TimeoutError):
            await write_all(shell.child.pipes.fds[INPUT], frame_command(command, running.nonce), until)
            return await interrupter.read_report(running.nonce, until, stops_at_request=True)
        if interrupter.is_requested:
            if (code := await interrupter.interrupt(running, until)) is not None:
                return code
            with suppress(TimeoutError):
                return await interrupter.read_report(running.nonce, until)
        if await interrupter.end_overdue(running) is None:
            raise SessionDiedError(
                "the command timed out, and only ending its shell could stop it", timed_out=True
            )
        return None

    async def interrupt(self) -> None:
        if not self._control.alive:
            raise SandboxClosedError("the sandbox has ended")
        if self._process is not None and self._process.interrupter.running is not None:
            await self._process.interrupter.request()
