"""The base of both kinds of sessions, their output as it comes, and how to open them ahead of their first use.

A session has one process, started when it is needed, and one call at a time. The death of a process is raised once,
with its cause if the sandbox knows one. The next call starts another process.
"""

import asyncio
import codecs
import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from sandboxes.contract import OnOutput, Sandbox, SessionName, SessionOutput
from sandboxes.errors import FileMissingError, SandboxError, SessionDiedError
from sandboxes.limits.freezer import Freezer
from sandboxes.limits.token_bucket import TokenBucket
from sandboxes.limits.violations import LimitViolations
from sandboxes.runtime.control import ControlShell
from sandboxes.runtime.pipes import OutputBuffer
from sandboxes.task_groups import open_task_group

PIECE_SIZE = 100
"""A piece counts as so many characters more, for what it takes to keep it."""
LEFT_OUT = "\n[... the rest of the output is left out ...]\n"


class OutputFeed:
    """Passes the output of a running command or cell on, never more than its limit."""

    def __init__(self, on_output: OnOutput | None, limit: int) -> None:
        self._on_output = on_output
        self._room = limit

    def add(self, kind: Literal["stdout", "stderr", "display", "result"], formats: Mapping[str, str]) -> None:
        """Pass a piece on; one that is too large ends the feed with a note."""
        if self._on_output is None or self._room < 0 or not formats:
            return
        self._room -= PIECE_SIZE + sum(len(name) + len(text) for name, text in formats.items())
        if self._room >= 0:
            self._on_output(SessionOutput(kind, formats))
        else:
            self._on_output(SessionOutput("stdout", {"text/plain": LEFT_OUT}))

    def adder(self, output: OutputBuffer) -> Callable[[bytes], None]:
        """Return a function that adds what was printed to both; a character may come in two parts."""
        if self._on_output is None:
            return output.add
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode

        def add(data: bytes) -> None:
            output.add(data)
            if text := decode(data):
                self.add("stdout", {"text/plain": text})

        return add


class SessionProcess(Protocol):
    @property
    def has_ended(self) -> bool:
        """As far as is known."""

    def discard(self) -> None:
        """Kill the process group, without waiting. Idempotent."""


P = TypeVar("P", bound=SessionProcess)


class SerialSession(ABC, Generic[P]):
    """Has at most one process; calls wait for each other."""

    _death_message: ClassVar[str]

    def __init__(
        self,
        control: ControlShell,
        *,
        cwd: str,
        env: Mapping[str, str],
        violations: LimitViolations,
        explain: Callable[[SessionDiedError], Awaitable[SandboxError]],
        freezer: Freezer,
    ) -> None:
        """`explain` returns the cause of a death if the sandbox knows one, such as its memory limit."""
        self._control = control
        self._cwd = cwd
        self._env = env
        self._violations = violations
        self._explain = explain
        self._freezer = freezer
        self._lock = asyncio.Lock()  # every call takes it, and anyio's costs as much as the rest of a command
        self._restarts = TokenBucket(FREE, PERIOD)
        self._process: P | None = None
        self.is_closed = False

    @abstractmethod
    async def _start(self) -> None:
        """Set `_process`."""

    async def open(self) -> None:
        """Start the process if there is none. The caller holds the lock.

        Raises:
            SandboxStartError: The process did not start, or not in time.
            SandboxClosedError: The sandbox has ended.
            SessionDiedError: The previous process has ended since the last call, or its successor did not start.
        """
        if self._process is not None:
            if not self._process.has_ended:
                return
            self.discard()
            raise await self._explain(SessionDiedError(self._death_message))
        await self._restarts.take()
        if not self.is_closed:
            await self._start()
        if self.is_closed:  # also meanwhile
            self.discard()
            raise SessionDiedError("the session has been closed")

    async def ensure_open(self) -> None:
        """Start the process at the first call; a later command or cell reports its end."""
        if self._process is None:
            async with self._lock:
                if self._process is None:
                    await self.open()

    @property
    def is_open(self) -> bool:
        """The process may have ended."""
        return self._process is not None

    @property
    def healthy(self) -> bool:
        """The process runs, or has not been started."""
        return self._process is None or not self._process.has_ended

    async def wait_until_idle(self) -> None:
        async with self._lock:
            pass

    async def restart(self) -> None:
        with self._freezer:
            self.discard()  # what runs now ends, and leaves the lock
            async with self._lock:
                self.discard()
                await self.open()

    async def close(self) -> None:
        self.is_closed = True
        self.discard()

    def discard(self) -> None:
        """Kill the process and its group, without waiting. Idempotent."""
        if self._process is not None:
            self._process.discard()
            self._process = None


# Restarts are bounded, so that code that keeps killing its session costs little: a kernel takes a quarter of a second
# of processor time to start, which neighboring sandboxes would notice. After the free ones, one starts every `PERIOD`
# seconds, and the caller waits.

FREE = 5
"""Starts without a wait, for an agent that types `exit` or runs out of memory."""
PERIOD = 5.0
"""Seconds in which one more start becomes free."""


async def open_sessions(sandbox: Sandbox, names: Iterable[SessionName]) -> None:
    """Open sessions concurrently; those that are open stay as they are.

    Raises:
        SandboxStartError: A session did not start.
        SandboxClosedError: The sandbox is closed or has ended.
    """
    async with open_task_group() as tasks:
        for name in names:
            tasks.start_soon(_open, sandbox, name, name=f"open {name} of {sandbox.id}")


async def _open(sandbox: Sandbox, name: SessionName) -> None:
    if name == "bash":
        await sandbox.bash()
    else:
        await sandbox.python()


async def return_to_workdir(sandbox: Sandbox, names: Iterable[SessionName]) -> None:
    """Enter the working folder again, in case it was replaced after the sessions were opened.

    Raises:
        FileMissingError: The folder no longer exists.
        SandboxStartError: A session was not open, and did not start.
        SandboxClosedError: The sandbox is closed or has ended.
        SessionDiedError: A session has ended.
    """
    entered = await sandbox.exec(["bash", "-c", 'cd -- "$1"', "enter", sandbox.workdir], cwd="/")
    if entered.exit_code != 0:
        raise FileMissingError(f"cannot enter the working folder: {entered.stderr.decode(errors='replace')}")
    for name in sorted(names):
        if name == "bash":
            await (await sandbox.bash()).run(f"cd -- {shlex.quote(sandbox.workdir)}")
        else:
            await (await sandbox.python()).execute(f"__import__('os').chdir({sandbox.workdir!r})")
