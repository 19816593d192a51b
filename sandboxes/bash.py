"""The persistent bash session: an interactive bash without a terminal, one command at a time.

Each command is sent as one quoted `eval` and a line that reports its exit code, under a nonce, on a pipe of
its own which the command does not have. So output cannot be taken for a result, a process in the background
that holds the output open delays nothing, and after an interrupt the shell still reports. Interactive, since
then SIGINT and an unset variable end the command and not the shell.
"""

import asyncio
import os
import shlex
import time
from collections.abc import Awaitable, Callable

import anyio

from sandboxes.breaches import Breaches
from sandboxes.contract import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, BashResult, BashSession
from sandboxes.control import Child, ControlShell, ticks_now
from sandboxes.errors import SandboxClosedError, SandboxError, SessionDiedError
from sandboxes.output import OutputBuffer
from sandboxes.pipes import ERROR, INPUT, Reader, write_all
from sandboxes.restarts import Restarts

ARGV = ("bash", "--norc", "--noprofile", "--noediting", "-i")
ENV = {"PS1": "", "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}
STATUS_FUNCTION = "__rollout_status"
SETUP = (
    "set +o history +H; unset HISTFILE PS1 PS2; shopt -u checkwinsize; "
    f'{STATUS_FUNCTION}() {{ \\builtin return "$1"; }}\n'
).encode()

JOBS_LIMIT = 1024
PID_DIGITS = 10
INTERRUPTS, INTERRUPT_PAUSE = 10, 1.0
"""SIGINT is lost on a process that the shell has forked and that is not its program yet, so it is sent again."""
STEPS = (("INT", 2.0), ("TERM", 1.0), ("KILL", 1.0))
"""What a command gets at its time-out, and how long it may take to heed it."""


class ShellSession(BashSession):
    """A bash inside of a sandbox, started at its first command and again after it has died."""

    def __init__(
        self,
        control: ControlShell,
        *,
        cwd: str,
        env: dict[str, str],
        breaches: Breaches,
        explain: Callable[[SessionDiedError], Awaitable[SandboxError]],
    ) -> None:
        """`explain` turns a death into its cause where the sandbox knows one, such as its memory limit."""
        self._control = control
        self._cwd = cwd
        self._env = {**env, **ENV}
        self._breaches = breaches
        self._explain = explain
        self._lock = asyncio.Lock()  # each turn takes it, and anyio's costs as much as the rest of the call
        self._restarts = Restarts()
        self._child: Child | None = None
        self._reader: Reader | None = None
        self._jobs: list[int] = []
        """What ran in the background when the present command began."""
        self._last = 0
        """The exit code of the command before."""
        self._since: int | None = None
        """When the present command began, in ticks."""
        self._ended: anyio.Event | None = None
        """Set when the present command has ended, where somebody waits for it."""

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
        await self._restarts.wait()
        child = await self._control.spawn("session", ARGV, cwd=self._cwd, env=self._env)
        child.pipes.close(ERROR)  # the shell's own complaints go nowhere, its commands' to the output
        self._child, self._reader, self._last = child, Reader(child.stdout), 0
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
        child, reader = self._opened()
        begun, nonce = time.monotonic(), os.urandom(8).hex()
        until = asyncio.get_running_loop().time() + timeout
        self._since = since = ticks_now()
        code: int | None = None
        self._jobs = []
        reader.start(output.add)
        try:
            try:
                await write_all(child.pipes.fds[INPUT], _framed(command, nonce, self._last), until)
                code = await self._status(child, nonce, until)
            except TimeoutError:
                await self._interrupt(child, nonce, since)
        except SessionDiedError as error:
            reader.stop()
            error.output = output.text()
            raise await self._explain(error) from None
        finally:
            self._since = None
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            reader.stop()
        seconds, timed_out = time.monotonic() - begun, code is None
        breaches = self._breaches.of_call(
            timeout if timed_out else None, output.limit if output.truncated else None
        )
        return BashResult(output.text(), code, timed_out, output.truncated, seconds, breaches)

    def _opened(self) -> tuple[Child, Reader]:
        if self._child is None or self._reader is None:
            raise SessionDiedError("the shell ended before the command ran")
        return self._child, self._reader

    async def _interrupt(self, child: Child, nonce: str, since: int) -> None:
        """Stop the command that runs and keep the shell, if it can be done."""
        for name, grace in STEPS:
            await self._control.stop(child.group, name, since, self._jobs)
            with anyio.move_on_after(grace):
                await self._status(child, nonce)
                return
        raise SessionDiedError(
            "the command ran into its time-out and nothing less than its shell's end stopped it",
            timed_out=True,
        )

    async def interrupt(self) -> None:
        if not self._control.alive:
            raise SandboxClosedError("the sandbox has ended")
        child, since = self._child, self._since
        if child is None or since is None:
            return
        ended = self._ended = self._ended or anyio.Event()
        for _ in range(INTERRUPTS):
            if ended.is_set():
                return
            await self._control.stop(child.group, "INT", since, self._jobs)
            with anyio.move_on_after(INTERRUPT_PAUSE):
                await ended.wait()

    async def ensure(self) -> None:
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

    async def idle(self) -> None:
        """Wait until no command runs."""
        async with self._lock:
            pass

    async def _status(self, child: Child, nonce: str, until: float | None = None) -> int:
        """Wait for the report of a command; before it, the shell has named its jobs. Raises TimeoutError."""
        while (line := await child.status.next(until)) is not None:
            found, _, code = line.partition(" ")
            if found == nonce and code.isdigit():
                self._last = int(code)
                return self._last
            if found.isdigit() and len(found) < PID_DIGITS and len(self._jobs) < JOBS_LIMIT:
                self._jobs.append(int(found))
        raise SessionDiedError("the shell ended while the command ran")

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


def _framed(command: str, nonce: str, last: int) -> bytes:
    """The command with none of the session's own pipes, and then a report that an interrupt does not skip.

    Before it the shell names its jobs, and `$?` is made again what the last command left.
    """
    run = f"eval {shlex.quote(command)} </dev/null >&8 2>&8 8>&- 9>&-"
    report = f"\\builtin printf '%s %s\\n' {nonce} \"$?\" >&9"
    return f"\\builtin jobs -p >&9; {STATUS_FUNCTION} {last}; {run}\n{report}\n".encode(
        "utf-8", "surrogatepass"
    )
