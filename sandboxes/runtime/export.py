"""Files of a sandbox, read from the host's side: nothing that is inside runs or is asked.

The reading is done by `tree_reader.py`, a process of its own, which is ended when nobody takes the bytes any more.
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
"""How long the reader may give nothing."""
MESSAGE_BYTES = 4096


def reader_command(path: str, limit: int, first: FirstProcess | None = None) -> list[str]:
    """Return the command that reads an absolute path; it is the host's own without a first process."""
    numbers = [str(first.pid), str(first.parent)] if first is not None else []
    return [sys.executable, "-I", "-S", str(SCRIPT), path, str(limit), *numbers]


async def export_tree(
    path: str, command: Sequence[str], env: Mapping[str, str] = ENVIRONMENT
) -> AsyncGenerator[bytes, None]:
    """Read a file or folder as a tar archive, by a command that runs the reader.

    Raises:
        FileMissingError: there is no such path.
        FileTooLargeError: it is larger than the limit.
        SandboxClosedError: the sandbox has ended.
        SandboxFileError: it cannot be read, or nothing came for `STALL_SECONDS`.
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
    """Return the next bytes that the reader writes, or None at their end."""
    if process.stdout is None:
        raise AssertionError("its standard output is a pipe")
    try:
        with anyio.fail_after(STALL_SECONDS):
            return await process.stdout.receive()
    except anyio.EndOfStream:
        return None
    except TimeoutError as error:
        raise SandboxFileError(f"{path}: nothing came for {STALL_SECONDS:.0f} s") from error


async def _require_success(path: str, process: Process) -> None:
    """Raise the error that the reader's exit code stands for."""
    said = b""
    if process.stderr is not None:
        async for part in process.stderr:
            said = (said + part)[-MESSAGE_BYTES:]
    code = await process.wait()
    message = said.decode("utf-8", errors="replace").strip()
    if code == MISSING:
        raise FileMissingError(f"{path}: no such file or folder")
    if code == TOO_LARGE:
        raise FileTooLargeError(f"{path}: {message}", hint="allow more, or ask for less")
    if code == ENDED:
        raise SandboxClosedError("the sandbox has ended by itself")
    if code != 0:
        raise SandboxFileError(f"{path}: it cannot be read from the host: {message or f'failed with {code}'}")


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.aclose()
