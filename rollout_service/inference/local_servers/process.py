"""Running an engine as a child process: start, wait until it serves, always end it.

Guarantees: the child has a session of its own; leaving the context ends its whole process group, by SIGTERM and
after a grace by SIGKILL, also when the body fails or is cancelled; a start that fails raises with the end of the
child's log. What the child prints goes to a file that is deleted with the context.
"""

import os
import signal
import socket
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

import aiohttp
import anyio
import anyio.abc

from rollout_service.errors import ConfigurationError
from sandboxes.host.children import start_process

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0
_TAIL_BYTES = 4000


class EngineStartError(ConfigurationError):
    """An engine's process ended, or did not serve in time; the message has the end of its log."""

    code = "engine_start"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server."""

    command: list[str]
    environment: Mapping[str, str]
    """The child's, whole."""
    port: Callable[[], int | None]
    """The port, once it is known."""


class ServerProcess(ABC):
    """A server in a child process, for as long as the context lasts; inside it `/health` answers 200.

    Raises:
        EngineStartError: on entering, if it did not start.
    """

    start_seconds = 60.0

    def __init__(self, *, on_wait: Callable[[float], None] | None = None) -> None:
        """`on_wait` is called while the start takes its time, with the seconds that have passed."""
        self._on_wait = on_wait
        self._stack = AsyncExitStack()
        self._url = ""
        self._pid = 0
        self._process: anyio.abc.Process | None = None

    @property
    def url(self) -> str:
        """Where the server answers."""
        return self._url

    @property
    def pid(self) -> int:
        """The child's process id, which is its process group's too."""
        return self._pid

    async def ended(self) -> int:
        """Wait until the child has ended by itself; its exit code. Inside the context only."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return await self._process.wait()

    @abstractmethod
    def _server_command(self, folder: Path) -> ServerCommand:
        """What to start; `folder` is its working directory, and is deleted afterwards."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-engine-")))
            launch = self._server_command(folder)
            process = await _start(launch, folder)
            stack.push_async_callback(_end, process)
            self._process, self._pid = process, process.pid
            self._url = await self._wait_until_healthy(process, launch, folder)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _wait_until_healthy(
        self, process: anyio.abc.Process, launch: ServerCommand, folder: Path
    ) -> str:
        started = time.monotonic()
        async with aiohttp.ClientSession() as session:
            while (waited := time.monotonic() - started) < self.start_seconds:
                if process.returncode is not None:
                    raise EngineStartError(
                        f"the engine ended with {process.returncode}. Its log ends:\n{_tail(folder)}"
                    )
                port = launch.port()
                if port is not None and await _is_healthy(session, f"http://127.0.0.1:{port}"):
                    return f"http://127.0.0.1:{port}"
                if self._on_wait is not None:
                    self._on_wait(waited)
                await anyio.sleep(_POLL_SECONDS)
        raise EngineStartError(
            f"the engine did not serve in {self.start_seconds:g} s. Its log ends:\n{_tail(folder)}"
        )


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _log(folder: Path) -> Path:
    return folder / "server.log"


def _tail(folder: Path) -> str:
    with _log(folder).open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        return stream.read().decode(errors="replace").strip()


async def _start(launch: ServerCommand, folder: Path) -> anyio.abc.Process:
    with _log(folder).open("wb") as output:
        return await start_process(
            launch.command,
            stdin=subprocess.PIPE,  # it closes when this process ends, however that happens
            stdout=output,
            stderr=output,
            env=dict(launch.environment),
            cwd=folder,
            new_session=True,
        )


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=30)) as answer:
            return answer.status == HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _end(process: anyio.abc.Process) -> None:
    """End the process group; what is left of it after the grace is killed."""
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
