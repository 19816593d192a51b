"""Read a sandbox's files from the host's side, without running or trusting anything inside.

A separate process, `tree_reader.py`, does the reading. It is ended when nobody takes the bytes any more.
"""

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import IO

import anyio

from sandboxes.errors import FileMissingError, FileTooLargeError, SandboxClosedError, SandboxFileError
from sandboxes.host.children import wait_exit
from sandboxes.host.processes import FirstProcess
from sandboxes.runtime.tree_reader import ENDED, MISSING, TOO_LARGE

SCRIPT = Path(__file__).with_name("tree_reader.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
STALL_SECONDS = 120.0
"""The reader may produce nothing for so long."""
PART_BYTES = 256 * 1024
MESSAGE_BYTES = 4096


def reader_command(path: str, limit: int, first: FirstProcess | None = None) -> list[str]:
    """Read an absolute path of a sandbox, or of the host if there is no first process."""
    numbers = [str(first.pid), str(first.parent)] if first is not None else []
    return [sys.executable, "-I", "-S", str(SCRIPT), path, str(limit), *numbers]


async def export_tree(
    path: str, command: Sequence[str], env: Mapping[str, str] = ENVIRONMENT
) -> AsyncGenerator[bytes, None]:
    """Yield a tar archive from a command that runs the reader.

    Raises:
        FileMissingError: The path does not exist.
        FileTooLargeError: The content is larger than the limit.
        SandboxClosedError: The sandbox has ended.
        SandboxFileError: The path cannot be read, or nothing arrived for `STALL_SECONDS`.
    """
    # Not by the event loop: uvloop forks, which copies the page tables of the whole service.
    process = subprocess.Popen(  # noqa: ASYNC220  it returns once the program has begun
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd="/",
    )
    try:
        while part := await _next_part(path, _descriptor(process.stdout)):
            yield part
        await _require_success(path, process)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


def _descriptor(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise AssertionError("its output is a pipe")
    return pipe.fileno()


async def _next_part(path: str, pipe: int) -> bytes:
    try:
        with anyio.fail_after(STALL_SECONDS):
            await anyio.wait_readable(pipe)
    except TimeoutError as error:
        raise SandboxFileError(f"{path}: no data for {STALL_SECONDS:.0f} s") from error
    return os.read(pipe, PART_BYTES)


async def _require_success(path: str, process: subprocess.Popen[bytes]) -> None:
    said = b""
    while part := await _next_part(path, _descriptor(process.stderr)):
        said = (said + part)[-MESSAGE_BYTES:]
    if not await wait_exit(process, STALL_SECONDS):
        raise SandboxFileError(f"{path}: its reader does not end")
    raise_for_exit(path, process.returncode, said.decode("utf-8", errors="replace").strip())


def raise_for_exit(path: str, code: int, message: str) -> None:
    if code == MISSING:
        raise FileMissingError(f"{path}: no such file or folder")
    if code == TOO_LARGE:
        raise FileTooLargeError(f"{path}: {message}", hint="raise the limit, or export less")
    if code == ENDED:
        raise SandboxClosedError("the sandbox has ended by itself")
    if code != 0:
        raise SandboxFileError(f"{path}: cannot be read from the host: {message or f'exit code {code}'}")


async def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    while not await wait_exit(process, STALL_SECONDS):
        pass  # a killed process may be stuck in the kernel
