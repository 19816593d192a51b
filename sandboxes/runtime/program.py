"""A program inside a sandbox that the host speaks with, over its pipes."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from sandboxes.contract import RunningProgram
from sandboxes.runtime.control import Child, ControlShell
from sandboxes.runtime.pipes import ERROR, INPUT, READ_SIZE, OutputBuffer, Reader, read_some, write_all

ERRORS_LIMIT = 16 * 1024


class ProgramPipes(RunningProgram):
    """Implements the contract with the pipes of a child of the control shell."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._errors = OutputBuffer(ERRORS_LIMIT)
        self._reader = Reader(child.pipes.fds[ERROR])
        self._reader.start(self._errors.add)
        self._code: int | None = None

    async def send(self, data: bytes) -> bool:
        for at in range(0, len(data), READ_SIZE):
            await anyio.lowlevel.checkpoint()
            if self._child.stdin is None or not await write_all(self._child.stdin, data[at : at + READ_SIZE]):
                return False
        return True

    def close_input(self) -> None:
        self._child.pipes.close(INPUT)

    async def receive(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while (data := read_some(self._child.stdout, READ_SIZE)) is None:
            await anyio.wait_readable(self._child.stdout)
        return data

    def errors(self) -> str:
        return self._errors.text()

    async def wait(self) -> int:
        if self._code is None:
            self._code = self._child.shell_exit_code(await self._child.wait_for_exit())
            self._reader.stop()
        return self._code

    def close(self) -> None:
        """Kill the program and close the pipes. Idempotent."""
        self._reader.close()
        self._child.discard()


@asynccontextmanager
async def running(
    control: ControlShell, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]
) -> AsyncIterator[RunningProgram]:
    """Start a program, and end it with the block.

    Raises:
        SandboxClosedError, SandboxStartError: The program cannot be started, as in `Sandbox.program`.
    """
    program = ProgramPipes(await control.spawn("run", argv, cwd=cwd, env=env))
    try:
        yield program
    finally:
        program.close()
