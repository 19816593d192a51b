"""Read a sandbox's files from the host's side, without running or trusting anything inside.

A separate process, `tree_reader.py`, does the reading. It is ended when nobody takes the bytes any more.
"""

import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import anyio
from anyio.abc import Process

from sandboxes.errors import FileMissingError, FileTooLargeError, SandboxClosedError, SandboxFileError
from sandboxes.host.children import start_process
from sandboxes.host.processes import FirstProcess
from sandboxes.runtime.tree_reader import ENDED, MISSING, TOO_LARGE

SCRIPT = Path(__file__).with_name("tree_reader.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
STALL_SECONDS = 120.0
"""How long the reader may produce nothing."""
MESSAGE_BYTES = 4096


def reader_command(path: str, limit: int, first: FirstProcess | None = None) -> list[str]:
    """Return the command that reads an absolute path of a sandbox, or of the host if there is no first process."""
    numbers = [str(first.pid), str(first.parent)] if first is not None else []
    return [sys.executable, "-I", "-S", str(SCRIPT), path, str(limit), *numbers]


async def export_tree(
    path: str, command: Sequence[str], env: Mapping[str, str] = ENVIRONMENT
) -> AsyncGenerator[bytes, None]:
    """Yield a file or folder as a tar archive, from a command that runs the reader.

    Raises:
        FileMissingError: The path does not exist.
        FileTooLargeError: The content is larger than the limit.
        SandboxClosedError: The sandbox has ended.
        SandboxFileError: The path cannot be read, or nothing arrived for `STALL_SECONDS`.
    """
    process = await start_process(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd="/",
    )
    try:
        while (part := await _next_part(path, process)) is not None:
            yield part
        await _require_success(path, process)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _next_part(path: str, process: Process) -> bytes | None:
    """Return the next bytes from the reader, or None at the end."""
    if process.stdout is None:
        raise AssertionError("its standard output is a pipe")
    try:
        with anyio.fail_after(STALL_SECONDS):
            return await process.stdout.receive()
    except anyio.EndOfStream:
        return None
    except TimeoutError as error:
        raise SandboxFileError(f"{path}: no data for {STALL_SECONDS:.0f} s") from error


async def _require_success(path: str, process: Process) -> None:
    """Raise the error that the reader's exit code stands for, if any."""
    said = b""
    if process.stderr is not None:
        async for part in process.stderr:
            said = (said + part)[-MESSAGE_BYTES:]
    code = await process.wait()
    message = said.decode("utf-8", errors="replace").strip()
    if code == MISSING:
        raise FileMissingError(f"{path}: no such file or folder")
    if code == TOO_LARGE:
        raise FileTooLargeError(f"{path}: {message}", hint="raise the limit, or export less")
    if code == ENDED:
        raise SandboxClosedError("the sandbox has ended by itself")
    if code != 0:
        raise SandboxFileError(f"{path}: cannot be read from the host: {message or f'exit code {code}'}")


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.aclose()
