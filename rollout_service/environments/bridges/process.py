"""A library in a process of its own: one JSON value a line goes in, and one comes back.

Guarantees: the process ends with its block, however that ends; a request that takes longer than it may ends the
process, and so does a reply that is not JSON. Nothing that the library prints can become a reply.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout_service.errors import EnvironmentFailedError
from sandboxes.host.children import start_process

MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
_LOST: Final = (
    *(anyio.BrokenResourceError, anyio.ClosedResourceError),
    *(anyio.IncompleteRead, anyio.DelimiterNotFound, OSError),
)
"""What reading from or writing to a process that has ended may raise, or one that sends no line."""


class LibraryProcess:
    """A running process; `library_process` starts one."""

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        self._stdin = process.stdin
        self._replies = BufferedByteReceiveStream(process.stdout)

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            EnvironmentFailedError: The library failed, took too long, or ended; only after the first can it go on.
        """
        try:
            with anyio.fail_after(seconds):
                await self._stdin.send(json.dumps(request).encode() + b"\n")
                line = await self._replies.receive_until(b"\n", MAX_REPLY_BYTES)
            reply: dict[str, Any] = json.loads(line)
        except TimeoutError:
            _kill(self._process)
            raise EnvironmentFailedError(f"{self._name} gave no reply within {seconds:g} s") from None
        except (*_LOST, ValueError) as error:
            _kill(self._process)
            raise EnvironmentFailedError(
                f"the process of {self._name} ended, or sent something else than a reply",
                hint="The service's standard error has its last words.",
            ) from error
        if "error" in reply:
            raise EnvironmentFailedError(f"{self._name} failed: {reply['error']}")
        return reply


@asynccontextmanager
async def library_process(command: Sequence[str | Path], name: str) -> AsyncIterator[LibraryProcess]:
    """Run a library's process within the block; its standard error is the service's."""
    process = await start_process(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        new_session=True,
    )
    try:
        yield LibraryProcess(process, name)
    finally:
        with anyio.CancelScope(shield=True):
            _kill(process)
            await process.aclose()


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):  # it may have ended, and not be known to
        process.kill()
