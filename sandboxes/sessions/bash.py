"""The persistent bash session: an interactive bash without a terminal that runs one command at a time.

Each command is sent as one quoted `eval`, followed by a line that reports its exit code. The report carries a nonce
and goes through a pipe that the command does not have. Therefore:

- output is never mistaken for a report;
- a background process that keeps the output open delays nothing;
- after an interrupt the shell still reports, once nothing of the command runs any more (see `Interrupter`).

The shell is interactive, so SIGINT and an unset variable end the command and not the shell.
"""

import asyncio
import math
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from sandboxes.contract import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, BashResult, BashSession, OnOutput
from sandboxes.errors import SandboxClosedError, SandboxUnsavedError, SessionDiedError
from sandboxes.runtime.control import Child, ControlShell, ticks_now
from sandboxes.runtime.pipes import ERROR, FIRST_LOOK, INPUT, OUTPUT, OutputBuffer, Reader, count_pending
from sandboxes.sessions.bash_state import DUMP_SECONDS, MAX_BYTES, make_dump, parse_dump
from sandboxes.sessions.serial_session import OutputFeed, SerialSession

ARGV = ("bash", "--norc", "--noprofile", "--noediting", "-i")
DESCRIPTORS = frozenset({0, 1, 2, 8, 9, 255})
"""Open in a session's shell between two commands."""
ENV = {"PS1": "", "PS2": "", "PAGER": "cat", "GIT_PAGER": "cat"}


class _Shell:
    __slots__ = ("child", "interrupter", "reader")

    def __init__(self, control: ControlShell, child: Child) -> None:
        self.child = child
        self.reader = Reader(child.pipes.fds[OUTPUT])
        self.interrupter = Interrupter(control, child)

    @property
    def has_ended(self) -> bool:
        return self.child.status.ended

    def discard(self) -> None:
        """Kill the process group, without waiting. Idempotent."""
        self.reader.close()
        self.child.discard()


JOBS_LIMIT = 1024
PID_DIGITS = 10


@dataclass(frozen=True, slots=True)
class InterruptTiming:
    interrupt_steps: Sequence[tuple[str, float]] = (("INT", 1.0),) * 10
    """The signals of a requested interrupt, each with the seconds that the command has to react."""

    timeout_steps: Sequence[tuple[str, float]] = (("INT", 1.0), ("INT", 1.0), ("TERM", 1.0), ("KILL", 1.0))
    nudge_pause: float = 0.03
    """Seconds between two signals to the shell alone."""

    tries: int = 20
    """How often the control shell looks for a running program after the first step, as in a loop."""

    questions: int = 10
    question_pause: float = 1.0
    """Seconds to answer a question."""

    looks: int = 50
    """Looks, `FIRST_LOOK` seconds apart, at whether the shell still reads its command."""

    @property
    def interrupt_seconds(self) -> float:
        return sum(seconds for _, seconds in self.interrupt_steps)


class ShellCommand(NamedTuple):
    nonce: str
    """Marks its report."""

    since: int
    """In ticks since boot."""


class Interrupter:
    """Reads the reports of one shell, and interrupts its commands. A shell is in one of five states:

    - *idle*: no command runs. A command makes it *running*; an interrupt does nothing.
    - *running*: the host waits for the report of the command's end, which makes it *idle*. A requested interrupt or the
      timeout makes it *interrupting*; the end of the shell makes it *dead*.
    - *interrupting*: signals go to the command, one step of `InterruptTiming` after another, until its report makes the
      shell *settling*. After all steps of a requested interrupt (10 s), the command keeps running until its timeout;
      after those of the timeout (4 s), the shell is *dead*.
    - *settling*: a signal may still be on its way and would end the next command. The shell is asked, up to `questions`
      times, to report once more. Its answer makes it *idle*; no answer makes it *dead*.
    - *dead*: the session discards the shell, and the next command starts another.

    Signals are sent more than once, for these reasons:

    - SIGINT is lost on a process that the shell has forked and that is not its program yet, so each step sends it
      again.
    - A shell drops SIGINT while it waits for a program that ends by itself, so a loop over short programs would hardly
      ever end. So the shell alone gets SIGINT every `nudge_pause` seconds; one whose program takes longer ignores it.
    - A nudge may end the report itself, so every other nudge is a question instead: the shell reports once more.
    - A shell that is interrupted while it reads its command would take the rest for another command. So nothing is sent
      before the shell has read all of it, or `looks` looks are over.
    - The control shell spares the jobs of the last report and everything older than the command: they run in the
      background. `control.sh` describes how it finds the rest.
    """

    def __init__(self, control: ControlShell, child: Child, timing: InterruptTiming | None = None) -> None:
        self.timing = timing or InterruptTiming()
        self.running: ShellCommand | None = None

        self._control = control
        self._child = child
        self._jobs: list[int] = []

        self._requested: anyio.Event | None = None
        """Set at the end of a command whose interrupt was requested."""

    @property
    def is_requested(self) -> bool:
        return self._requested is not None

    def begin(self) -> ShellCommand:
        """Idle becomes running."""
        self.running = ShellCommand(os.urandom(8).hex(), ticks_now())
        self._jobs = []
        return self.running

    def end(self) -> None:
        self.running = None
        if self._requested is not None:
            self._requested.set()
            self._requested = None

    async def request(self) -> None:
        """Wait for the end of the command, or for `interrupt_seconds`."""
        requested = self._requested = self._requested or anyio.Event()
        self._child.status.expire()
        with anyio.move_on_after(self.timing.interrupt_seconds):
            await requested.wait()

    async def read_report(self, nonce: str, until: float | None = None, *, stops_at_request: bool = False) -> int:
        """Return the exit code of the report with this nonce; the report before it has named the jobs.

        Raises:
            TimeoutError: The report has not come by `until`, or an interrupt was requested and `stops_at_request` is
                set.
            SessionDiedError: The shell has ended.
        """
        while not (stops_at_request and self.is_requested):
            line = await self._child.status.next(until)
            if line is None:
                raise SessionDiedError("the shell ended while the command ran")
            found, _, code = line.partition(" ")
            if found == nonce and code.isdigit():
                return int(code)
            if found.isdigit() and len(found) < PID_DIGITS and len(self._jobs) < JOBS_LIMIT:
                self._jobs.append(int(found))
        raise TimeoutError

    async def interrupt(self, command: ShellCommand, until: float) -> int | None:
        """Return the exit code, or None if the command goes on."""
        return await self._stop(command, self.timing.interrupt_steps, until)

    async def end_overdue(self, command: ShellCommand) -> int | None:
        """Return the exit code, or None if the command goes on."""
        return await self._stop(command, self.timing.timeout_steps)

    async def _stop(
        self, command: ShellCommand, steps: Sequence[tuple[str, float]], until: float = math.inf
    ) -> int | None:
        child, timing = self._child, self.timing
        for _ in range(timing.looks):
            await anyio.sleep(FIRST_LOOK)
            if (fd := child.pipes.fds.get(INPUT)) is None or not count_pending(fd):
                break
        now = asyncio.get_running_loop().time
        for number, (name, grace) in enumerate(steps):
            tries = timing.tries if number else 1
            await self._control.stop(child.group, name, command.since, self._jobs, tries)
            end, asks = min(until, now() + grace), False
            while now() < end:
                with suppress(TimeoutError):
                    return await self.read_report(command.nonce, min(end, now() + timing.nudge_pause))
                if asks:
                    self._ask(command.nonce)
                else:
                    await self._control.send("interrupt", str(child.group))
                asks = not asks
        return None

    async def settle(self) -> None:
        """Wait until no signal is on its way any more, which would end the next command.

        Raises:
            SessionDiedError: The shell has ended, or answers no question.
        """
        await self._control.wait_until_done()
        for _ in range(self.timing.questions):
            nonce = os.urandom(8).hex()
            self._ask(nonce)
            with suppress(TimeoutError):
                await self.read_report(nonce, asyncio.get_running_loop().time() + self.timing.question_pause)
                return
        raise SessionDiedError("the shell did not settle after it was interrupted")

    def _ask(self, nonce: str) -> None:
        if (fd := self._child.pipes.fds.get(INPUT)) is not None:
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(fd, frame_report(nonce))


class ShellSession(SerialSession[_Shell], BashSession):
    """Started at its first command and again after it has died."""

    _death_message = "the shell ended after its last command"
    state: bytes = b""
    """Run by the first shell before anything else: what `describe` returned for another one."""

    async def _start(self) -> None:
        child = await self._control.spawn("session", ARGV, cwd=self._cwd, env={**self._env, **ENV})
        child.pipes.close(ERROR)  # the shell's own complaints go nowhere, its commands' to the output
        self._process = _Shell(self._control, child)
        try:
            await child.pipes.write(SETUP + (frame_state(self.state) if self.state else b""))
        except BaseException:
            self.discard()  # it would take the next command for the rest of its state
            raise
        self.state = b""

    async def describe(self) -> bytes:
        """Return a script that gives another shell the state; empty if no shell was started.

        Raises:
            SandboxUnsavedError: It has something that no script gives to another, or has ended.
            SandboxClosedError: The sandbox has ended.
        """
        if not self.is_open:
            return self.state
        if not self.healthy:
            raise SandboxUnsavedError("the shell has ended")
        command, nonce = make_dump()
        try:
            found = await self.run(command, timeout=DUMP_SECONDS, output_limit=MAX_BYTES)
        except SessionDiedError as error:
            raise SandboxUnsavedError(f"the shell did not describe its state: {error}") from error
        if found.truncated:
            raise SandboxUnsavedError(f"the shell's state has more than {MAX_BYTES} bytes")
        return parse_dump(found.output, nonce)

    async def run(
        self,
        command: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        on_output: OnOutput | None = None,
    ) -> BashResult:
        if "\0" in command:
            raise ValueError("a command must not contain NUL characters")
        if timeout <= 0 or output_limit <= 0:
            raise ValueError("timeout and output_limit must be positive")
        with self._freezer:
            async with self._lock:
                await self.open()
                output = OutputBuffer(output_limit)
                try:
                    return await self._run(command, timeout, output, OutputFeed(on_output, output_limit))
                except BaseException:
                    self.discard()  # cancelled or dead: its work must not continue under the next command
                    raise

    async def _run(self, command: str, timeout: float, output: OutputBuffer, feed: OutputFeed) -> BashResult:
        if (shell := self._process) is None:
            raise SessionDiedError("the shell ended before the command ran")
        started, until = time.monotonic(), asyncio.get_running_loop().time() + timeout
        running = shell.interrupter.begin()
        shell.reader.start(feed.adder(output))
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
        """Return None if the timeout ended the command."""
        interrupter = shell.interrupter
        with suppress(TimeoutError):
            await shell.child.pipes.write(frame_command(command, running.nonce), until)
            return await interrupter.read_report(running.nonce, until, stops_at_request=True)
        if interrupter.is_requested:
            if (code := await interrupter.interrupt(running, until)) is not None:
                return code
            with suppress(TimeoutError):
                return await interrupter.read_report(running.nonce, until)
        if await interrupter.end_overdue(running) is None:
            raise SessionDiedError("the command timed out, and only ending its shell could stop it", timed_out=True)
        return None

    async def interrupt(self) -> None:
        if not self._control.alive:
            raise SandboxClosedError("the sandbox has ended")
        if self._process is not None and self._process.interrupter.running is not None:
            await self._process.interrupter.request()


# The shell writes the output of commands to descriptor 8, and reports to descriptor 9. A report comes once nothing of
# its command runs any more, which an interrupt does not skip. It leaves `$?` as the command did, and works with options
# that end the shell at errors. The rest of a report that an interrupt has cut is harmless.

REPORT, CODE = "__rollout_report", "__rollout_code"
INTERRUPTED = 128 + 2
# Descriptor 10 is bash's own copy of 7.
TERMINAL = "\\exec 7<>/dev/ptmx && \\exec 255>&- && { \\exec 255<&10; } 7<&-; \\exec 7<&-; (:); "
"""Give the shell a terminal to reset: an interactive bash resets descriptor 255 whenever a signal ends a job.

Without a terminal it writes `tcsetattr: Inappropriate ioctl for device` into the output of `yes | head -1`. Nothing
else uses the terminal. Commands do not inherit it: bash marks its copies of descriptors close-on-exec, and a duplicate
keeps the mark. The subshell makes bash read the state that it will restore. A shell that gets no terminal works too.
"""
SETUP = (
    f"{TERMINAL}set +o history +H; unset HISTFILE PS1 PS2; shopt -u checkwinsize; "
    f'{REPORT}() {{ \\builtin printf \'%s %s\\n\' "$1" "${{{CODE}-{INTERRUPTED}}}" >&9; \\builtin jobs -p >&9; '
    f'\\builtin set -- "${{{CODE}-{INTERRUPTED}}}"; \\builtin unset {CODE}; \\builtin return "$1"; }}\n'
).encode()
"""Define the report: the exit code, and then, while the host goes on, the jobs."""


def frame_command(command: str, nonce: str) -> bytes:
    """Return the lines that run a command without the session's pipes, followed by a report.

    The shell's own output is /dev/null, opened for reading and writing, and serves as the command's input. Opening
    /dev/null again would take longer than all the rest.
    """
    line = f"eval {shlex.quote(command)} <&1 >&8 2>&8 8>&- 9>&-\n"
    return line.encode("utf-8", "surrogatepass") + frame_report(nonce)


def frame_state(script: bytes) -> bytes:
    return (
        b"eval "
        + shlex.quote(script.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        + (b" <&1 >&1 2>&1 8>&- 9>&-\n")
    )


def frame_report(nonce: str) -> bytes:
    """Return the two lines of a report; at the end of the first the shell waits for work that an interrupt left.

    They contain no quotes: an interrupt while they are read leaves only the end of one, which must not open a quote.
    `&&:` keeps a shell that ends at errors from mistaking the reported code for one.
    """
    return f"{CODE}=$?\n{REPORT} {nonce}&&:\n".encode()
