"""Runs an engine as a child process: starts it, waits until it serves, and always ends it.

The child has its own session. Leaving the context ends its whole process group with SIGTERM and, after a grace period,
SIGKILL, even if the body fails or is cancelled. A failed start raises an error with the end of the child's log, which
is deleted with the context.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import anyio
import anyio.abc
import structlog

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

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self.url = ""
        self.pid = 0
        self._process: anyio.abc.Process | None = None

    async def ended(self) -> int:
        """Wait until the child exits by itself; only inside the context."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return await self._process.wait()

    @abstractmethod
    def _server_command(self, folder: Path) -> ServerCommand:
        """`folder` is the server's working directory, deleted afterwards."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-engine-")))
            command = self._server_command(folder)
            process = await _start(command, folder)
            stack.push_async_callback(_end, process)
            self._process, self.pid = process, process.pid
            self.url = await self._wait_until_healthy(process, command, folder)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _wait_until_healthy(self, process: anyio.abc.Process, command: ServerCommand, folder: Path) -> str:
        started = time.monotonic()
        while time.monotonic() - started < self.start_seconds:
            if process.returncode is not None:
                raise EngineStartError(
                    f"the engine exited with code {process.returncode}. Its log ends with:\n{_tail(folder)}"
                )
            port = command.port()
            if port is not None and await _is_healthy(f"http://127.0.0.1:{port}"):
                return f"http://127.0.0.1:{port}"
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


log = structlog.get_logger(__name__)

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""An engine that ran for this long is started again after the first delay."""


@asynccontextmanager
async def kept_running(make: Callable[[int], ServerProcess]) -> AsyncIterator[str]:
    """Run an engine, and start it again whenever it exits; yield its address.

    It comes back at the same address, where its pool's probes find it and give it the pool's weights before any
    request. The delay before a start grows while starts fail or do not last. No engine outlives the block. `make` makes
    one for a port, 0 for a free one.

    Raises:
        EngineStartError: The first start failed.
    """
    async with make(0) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(_start_again, engine, make)
        yield engine.url
        tasks.cancel_scope.cancel()


async def _start_again(engine: ServerProcess, make: Callable[[int], ServerProcess]) -> None:
    port, delay = urlsplit(engine.url).port or 0, FIRST_DELAY_SECONDS
    code, started = await engine.ended(), time.monotonic()
    while True:
        log.error("the engine ended; starting it again", url=engine.url, exit_code=code, in_seconds=delay)
        await anyio.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        try:
            async with make(port) as successor:
                started = time.monotonic()
                log.info("the engine runs again", url=successor.url)
                code = await successor.ended()
        except EngineStartError as error:
            log.error("the engine could not be started", error=str(error), hint=error.hint)
            continue
        if time.monotonic() - started >= STEADY_SECONDS:
            delay = FIRST_DELAY_SECONDS
