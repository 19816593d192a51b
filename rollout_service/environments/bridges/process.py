"""A library in a process of its own: one JSON value a line goes in, and one comes back.

Guarantees: the process ends with its block, with a request that takes too long, and with a reply that is not JSON.
Nothing that the library prints can become a reply, and the reply to a cancelled request does not become that to the
next.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from sandboxes import Sandbox
from sandboxes.host.children import start_process
from sandboxes.runtime.execution import ProgramStream

T = TypeVar("T")

MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
"""On the host, while a library is installed."""
MAX_SANDBOX_REPLY_BYTES: Final = 4 * 1024 * 1024
"""A longer one would hold up the service while it is read."""
LAST_WORDS_CHARS: Final = 1_000
_LOST: Final = (
    *(anyio.BrokenResourceError, anyio.ClosedResourceError),
    *(anyio.IncompleteRead, anyio.DelimiterNotFound, OSError),
)
"""The process has ended, or sent no line."""


class LibraryProcess:
    """`library_process` and `library_in_sandbox` start one."""

    def __init__(
        self,
        name: str,
        requests: ByteSendStream,
        replies: ByteReceiveStream,
        *,
        end: Callable[[], None],
        last_words: Callable[[], str],
        most: int,
    ) -> None:
        """A reply has at most `most` bytes."""
        self._name = name
        self._requests = requests
        self._replies = BufferedByteReceiveStream(replies)
        self._end = end
        self._last_words = last_words
        self._most = most
        self._owed = 0
        """Replies not read yet, those to cancelled requests among them."""

    async def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """
        Raises:
            EnvironmentFailedError: The library failed, took too long, or ended; only after the first can it go on.
        """
        try:
            with anyio.fail_after(seconds):
                await self._send(json.dumps(request).encode() + b"\n")
                line = b""
                while self._owed:
                    line = await self._replies.receive_until(b"\n", self._most)
                    self._owed -= 1
            reply = _read_object(line)
        except TimeoutError:
            self._end()
            raise EnvironmentFailedError(f"{self._name} gave no reply within {seconds:g} s") from None
        except (*_LOST, ValueError, RecursionError) as error:
            self._end()
            raise EnvironmentFailedError(
                f"the process of {self._name} ended, or sent something else than a reply",
                hint=self._last_words(),
            ) from error
        if "error" in reply:
            raise EnvironmentFailedError(f"{self._name} failed: {reply['error']}")
        return reply

    async def _send(self, line: bytes) -> None:
        try:
            await self._requests.send(line)
        except anyio.get_cancelled_exc_class():
            self._end()  # it may have read a part of the line
            raise
        self._owed += 1


@asynccontextmanager
async def library_process(command: Sequence[str | Path], name: str) -> AsyncIterator[LibraryProcess]:
    """Run a library's process on this host within the block; its standard error is the service's."""
    process = await start_process(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        new_session=True,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    try:
        yield LibraryProcess(
            name,
            process.stdin,
            process.stdout,
            end=lambda: _kill(process),
            last_words=lambda: "The service's standard error has its last words.",
            most=MAX_REPLY_BYTES,
        )
    finally:
        with anyio.CancelScope(shield=True):
            _kill(process)
            await process.aclose()


def run_while_installing(work: Callable[[], Awaitable[T]], problem: str) -> T:
    """
    Raises:
        ConfigurationError: The library failed; the message begins with the `problem` that this is.
    """
    try:
        return anyio.run(work)
    except EnvironmentFailedError as error:
        raise ConfigurationError(f"{problem}: {error}", hint=error.hint) from error


@asynccontextmanager
async def library_in_sandbox(
    sandbox: Sandbox, command: Sequence[str], name: str, *, env: Mapping[str, str] | None = None
) -> AsyncIterator[LibraryProcess]:
    """Run a library's process in a sandbox within the block: the place for one that reads an agent's texts."""
    async with sandbox.program(command, env=env) as program:
        stream = ProgramStream(program)
        yield LibraryProcess(
            name,
            stream,
            stream,
            end=program.close_input,
            last_words=lambda: f"It said: {program.errors().strip()[-LAST_WORDS_CHARS:] or 'nothing'}",
            most=MAX_SANDBOX_REPLY_BYTES,
        )


@cache
def source_of(worker: Path) -> str:
    """Return a program's text, to run it where its file is not."""
    return worker.read_text()


def _read_object(line: bytes) -> dict[str, Any]:
    reply = json.loads(line)
    if isinstance(reply, dict):
        return reply
    raise ValueError("a reply is a JSON object")


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):  # it may have ended, and not be known to
        process.kill()
