"""How a command in a persistent bash is interrupted, and how its shell is kept.

A shell is in one of five states:

- *idle*: no command runs. A command makes it *running*; an interrupt does nothing.
- *running*: the host waits for the report of the command's end. The report makes it *idle*; a request to interrupt or
  the command's timeout makes it *interrupting*; the end of the shell makes it *dead*.
- *interrupting*: signals go to the command, one step of `InterruptTiming` after another, until its report comes.
  The report makes it *settling*. If a requested interrupt goes through all its steps (10 s) without a report, the
  command keeps running until its timeout. If the steps of the timeout (4 s) bring no report either, the shell is
  *dead*.
- *settling*: the report has come, but a signal may still be on its way and would end the next command. The shell is
  asked, up to `questions` times, to report once more. Its answer makes it *idle*; no answer makes it *dead*.
- *dead*: the session discards the shell, and the next command starts another.

Why signals are sent more than once, and to whom:

- SIGINT is lost on a process that the shell has forked and that is not its program yet. So each step sends it again.
- A shell drops SIGINT while it waits for a program that ends by itself, so a loop over short programs would hardly
  ever end. So the shell alone gets SIGINT every `nudge_pause` seconds; one whose program takes longer ignores it.
- A nudge may end the report itself. So every other nudge is a question instead: the shell reports once more.
- A shell that is interrupted while it reads its command would take the rest for another command. So nothing is sent
  before the shell has read all of it, or `looks` looks are over.
- The control shell spares the jobs of the last report and everything older than the command: they run in the
  background. `control.sh` describes how it finds the rest.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from sandboxes.errors import SessionDiedError
from sandboxes.runtime.control import Child, ControlShell, ticks_now
from sandboxes.runtime.pipes import FIRST_LOOK, count_pending
from sandboxes.sessions.bash_protocol import frame_report

JOBS_LIMIT = 1024
PID_DIGITS = 10


@dataclass(frozen=True, slots=True)
class InterruptTiming:
    """The signals of an interrupt, and how long each part of it may take."""

    interrupt_steps: Sequence[tuple[str, float]] = (("INT", 1.0),) * 10
    """The signals of a requested interrupt, each with the seconds that the command has to react to it."""

    timeout_steps: Sequence[tuple[str, float]] = (("INT", 1.0), ("INT", 1.0), ("TERM", 1.0), ("KILL", 1.0))
    """The same for a command at its timeout."""

    nudge_pause: float = 0.03
    """Seconds between two signals to the shell alone within a step."""

    tries: int = 20
    """How often the control shell looks for a running program after the first step, for example in a loop."""

    questions: int = 10
    """How often an interrupted shell is asked whether it is ready."""

    question_pause: float = 1.0
    """Seconds that the shell has to answer each question."""

    looks: int = 50
    """The most looks, `FIRST_LOOK` seconds apart, at whether the shell still reads its command."""

    @property
    def interrupt_seconds(self) -> float:
        """The longest that a requested interrupt may take."""
        return sum(seconds for _, seconds in self.interrupt_steps)


class ShellCommand(NamedTuple):
    """One command of a shell."""

    nonce: str
    """Marks the report of its end."""

    since: int
    """When it began, in ticks since boot."""


class Interrupter:
    """Reads the reports of one shell, and interrupts its commands."""

    def __init__(self, control: ControlShell, child: Child, timing: InterruptTiming | None = None) -> None:
        self.timing = timing or InterruptTiming()
        self.running: ShellCommand | None = None
        """The command that runs."""

        self._control = control
        self._child = child
        self._jobs: list[int] = []
        """The processes in the background when the current command began."""

        self._requested: anyio.Event | None = None
        """Set at the end of the current command, if an interrupt of it was requested."""

    @property
    def is_requested(self) -> bool:
        """Whether an interrupt of the current command was requested."""
        return self._requested is not None

    def begin(self) -> ShellCommand:
        """Begin a command: idle becomes running."""
        self.running = ShellCommand(os.urandom(8).hex(), ticks_now())
        self._jobs = []
        return self.running

    def end(self) -> None:
        """End the command, and wake those who requested an interrupt of it."""
        self.running = None
        if self._requested is not None:
            self._requested.set()
            self._requested = None

    async def request(self) -> None:
        """Request an interrupt of the running command, and wait for its end or for `interrupt_seconds`."""
        requested = self._requested = self._requested or anyio.Event()
        self._child.status.expire()
        with anyio.move_on_after(self.timing.interrupt_seconds):
            await requested.wait()

    async def read_report(
        self, nonce: str, until: float | None = None, *, stops_at_request: bool = False
    ) -> int:
        """Wait for the report with this nonce, and return the exit code; the report before it has named the jobs.

        Raises:
            TimeoutError: The report has not come by `until`, or an interrupt was requested and
                `stops_at_request` is set.
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
        """Go through the steps of a requested interrupt; return the exit code, or None if the command goes on."""
        return await self._stop(command, self.timing.interrupt_steps, until)

    async def end_overdue(self, command: ShellCommand) -> int | None:
        """Go through the steps of a timeout; return the exit code, or None if the command goes on."""
        return await self._stop(command, self.timing.timeout_steps)

    async def _stop(
        self, command: ShellCommand, steps: Sequence[tuple[str, float]], until: float = math.inf
    ) -> int | None:
        child, timing = self._child, self.timing
        for _ in range(timing.looks):
            await anyio.sleep(FIRST_LOOK)
            if child.stdin is None or not count_pending(child.stdin):
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
                    await self._control.interrupt(child.group)
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
        """Ask the shell to report once more, if it still reads."""
        if self._child.stdin is not None:
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._child.stdin, frame_report(nonce))
