"""A terminal in a sandbox for a person, such as one for an interactive shell.

The sandbox's Python makes it inside, so it works with every provider. The command ends with the block. Everything that
arrives is untrusted, escape sequences included.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from select import PIPE_BUF

import anyio

from sandboxes.contract import RunningProgram, Sandbox
from sandboxes.errors import SandboxStartError
from sandboxes.sessions.terminal_program import FRAME, READY

PROGRAM = Path(__file__).with_name("terminal_program.py")
KEYS = PIPE_BUF - FRAME.size
"""Keys of one frame, which a pipe takes whole or not at all: a caller that is cancelled leaves no half of one."""


class SandboxTerminal:
    def __init__(self, program: RunningProgram, shown: bytes) -> None:
        self.program = program
        self._shown = shown
        self._lock = anyio.Lock()

    async def type(self, keys: bytes) -> bool:
        """Return False if the command takes no more."""
        async with self._lock:  # the keys of two callers must not mix
            return all([await self._send(0, 0, keys[at : at + KEYS]) for at in range(0, len(keys), KEYS)])

    async def resize(self, lines: int, columns: int) -> bool:
        """Return False if the command has ended."""
        async with self._lock:
            return await self._send(lines, columns, b"")

    async def _send(self, lines: int, columns: int, keys: bytes) -> bool:
        return await self.program.send(FRAME.pack(lines, columns, len(keys)) + keys)

    async def receive(self) -> bytes:
        """Return b"" at the end. For one caller at a time."""
        shown, self._shown = self._shown, b""
        return shown or await self.program.receive()

    async def wait(self) -> int:
        """Return the exit code as a shell reports it.

        Raises:
            SandboxClosedError: The sandbox has ended, and the command with it.
        """
        return await self.program.wait()


@asynccontextmanager
async def open_terminal(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    lines: int,
    columns: int,
    env: Mapping[str, str],
    cwd: str | None = None,
) -> AsyncIterator[SandboxTerminal]:
    """Run a command on a terminal, by default in the sandbox's working folder, and end it with the block.

    Raises:
        SandboxClosedError: The sandbox is closed or has ended.
        SandboxStartError: The sandbox has no Python that can make a terminal, or no process was left.
    """
    python = [sandbox.interpreter, "-I", "-S", "-c", PROGRAM.read_text()]
    async with sandbox.program([*python, str(lines), str(columns), *argv], cwd=cwd, env=env) as program:
        first = await program.receive()
        if first[: len(READY)] != READY:
            await program.wait()
            raise SandboxStartError(
                f"no terminal could be made in the sandbox: {program.errors().strip()}",
                hint="install python3 in the image, or let sandboxes bring one: sandbox.python = 'toolkit'",
            )
        yield SandboxTerminal(program, first[len(READY) :])
