"""Runs an engine as a child process: starts it, waits until it serves, and always ends it.

Guarantees: the child has its own session; leaving the context ends its whole process group with SIGTERM and, after a
grace period, SIGKILL, even if the body fails or is cancelled; a failed start raises an error with the end of the
child's log. The child's output goes to a file that is deleted with the context.
"""

import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from rollout_service.base.errors import ConfigurationError
from rollout_service.engines.kinds.http_client import HttpClient
from sandboxes.host.children import start_process

_POLL_SECONDS = 0.1
_PROBE_SECONDS = 30.0
_GRACE_SECONDS = 3.0
_TAIL_BYTES = 4000


class EngineStartError(ConfigurationError):
    """An engine's process exited, or did not serve in time; the message has the end of its log."""

    code = "engine_start"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server."""

    command: list[str]
    environment: Mapping[str, str]
    """The child's entire environment."""
    port: Callable[[], int | None]
    """Returns the port once it is known."""


class ServerProcess(ABC):
    """A server in a child process for as long as the context lasts; inside, `/health` answers 200.

    Raises:
        EngineStartError: The server did not start; raised on entering.
    """

    start_seconds = 60.0

    def __init__(self, *, on_wait: Callable[[float], None] | None = None) -> None:
        """Start nothing yet; `on_wait` is called during the start with the seconds passed so far."""
        self._on_wait = on_wait
        self._stack = AsyncExitStack()
        self._url = ""
        self._pid = 0
        self._process: anyio.abc.Process | None = None

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._url

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group's."""
        return self._pid

    async def ended(self) -> int:
        """Wait until the child exits by itself and return its exit code; only inside the context."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return await self._process.wait()

    @abstractmethod
    def _server_command(self, folder: Path) -> ServerCommand:
        """Return how to start the server; `folder` is its working directory, deleted afterwards."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-engine-")))
            command = self._server_command(folder)
            process = await _start(command, folder)
            stack.push_async_callback(_end, process)
            self._process, self._pid = process, process.pid
            self._url = await self._wait_until_healthy(process, command, folder)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _wait_until_healthy(
        self, process: anyio.abc.Process, command: ServerCommand, folder: Path
    ) -> str:
        started = time.monotonic()
        while (waited := time.monotonic() - started) < self.start_seconds:
            if process.returncode is not None:
                raise EngineStartError(
                    f"the engine exited with code {process.returncode}. Its log ends with:\n{_tail(folder)}"
                )
            port = command.port()
            if port is not None and await _is_healthy(f"http://127.0.0.1:{port}"):
                return f"http://127.0.0.1:{port}"
            if self._on_wait is not None:
                self._on_wait(waited)
            await anyio.sleep(_POLL_SECONDS)
        raise EngineStartError(
            f"the engine did not serve within {self.start_seconds:g} s. Its log ends with:\n{_tail(folder)}"
        )


def _log(folder: Path) -> Path:
    return folder / "server.log"


def _tail(folder: Path) -> str:
    with _log(folder).open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        return stream.read().decode(errors="replace").strip()


async def _start(command: ServerCommand, folder: Path) -> anyio.abc.Process:
    with _log(folder).open("wb") as output:
        return await start_process(
            command.command,
            stdin=subprocess.PIPE,  # it closes when this process ends, however that happens
            stdout=output,
            stderr=output,
            env=dict(command.environment),
            cwd=folder,
            new_session=True,
        )


async def _is_healthy(url: str) -> bool:
    client = HttpClient(url)
    try:
        status, _ = await client.exchange("GET", "/health", None, seconds=_PROBE_SECONDS)
    except OSError:
        return False
    finally:
        await client.close()
    return status == HTTPStatus.OK


async def _end(process: anyio.abc.Process) -> None:
    """Terminate the process group, and kill what is left of it after the grace period."""
    with anyio.CancelScope(shield=True):
        _signal_group(process.pid, signal.SIGTERM)
        with anyio.move_on_after(_GRACE_SECONDS):
            await process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
