"""A server as a child process, for commands that need one of their own.

The child has ended when the block is left, however it is left: SIGTERM, time to drain, then SIGKILL, always by its own
pid. If this process is killed, the kernel sends the child SIGTERM. Unless a settings file is among its flags, the
user's settings of a service for others, such as keys, TLS or a shared store, do not apply to it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process

from rollout_client.client import RolloutClient, UnavailableError, UnreachableError
from rollout_service.cli.common import CommandError
from sandboxes.host.children import start_process

START_SECONDS = 120.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05
SAY_SECONDS = 2.0
SHOWN_LOG_LINES = 15
NOT_LISTENING = "it does not listen yet"


@dataclass(frozen=True, slots=True)
class ServerChild:
    client: RolloutClient
    process: Process


@asynccontextmanager
async def running_server(state_dir: Path, flags: Sequence[str] = ()) -> AsyncIterator[RolloutClient]:
    """Do the same as `running_child`, but yield only the client."""
    async with running_child(state_dir, flags) as child:
        yield child.client


@asynccontextmanager
async def running_child(
    state_dir: Path, flags: Sequence[str] = (), *, say: Callable[[str], None] | None = None
) -> AsyncIterator[ServerChild]:
    """Start `rollout-service serve` on a free loopback port, and yield it with a client once it is ready.

    The server's log is `server.log` in `state_dir`. `say` is called every two seconds with the reason for the wait.
    """
    address, log = _prepare(state_dir)
    setpriv = shutil.which("setpriv")
    command = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
    command += [sys.executable, "-m", "rollout_service.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
    command += ["--state-dir", str(state_dir), "--port-file", str(address), *flags]
    command += [] if "--config" in flags else ["--own"]
    with log.open("wb") as file:
        process = await start_process(command, stdout=file, stderr=file, new_session=True)
    try:
        url = await _ready_address(process, address, log, say or (lambda _: None))
        async with RolloutClient(url) as client:
            yield ServerChild(client, process)
    finally:
        await stop(process)


async def stop(process: Process) -> None:
    """End a process: ask, wait, then kill; shielded and idempotent."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.terminate()
            with anyio.move_on_after(STOP_SECONDS):
                await process.wait()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await process.aclose()


async def _ready_address(process: Process, address: Path, log: Path, say: Callable[[str], None]) -> str:
    begun = said = time.monotonic()
    why = NOT_LISTENING
    with anyio.move_on_after(START_SECONDS):
        while process.returncode is None:
            url, why = await _look(address)
            if url is not None:
                return url
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                say(f"    waiting for the server, {said - begun:.0f} s: {why}")
            await anyio.sleep(POLL_SECONDS)
        why = f"it ended with exit code {process.returncode}"
    raise CommandError(f"the server did not start: {why}\n{_tail(log)}", hint=f"The whole log is in {log}.")


async def _look(address: Path) -> tuple[str | None, str]:
    """Return the URL if the server can take work, otherwise the reason why it cannot."""
    if (url := _read(address)) is None:
        return None, NOT_LISTENING
    try:
        async with RolloutClient(url, patience_seconds=0) as client:
            await client.ready()
    except (UnreachableError, UnavailableError) as error:
        return None, str(error)
    return url, ""


def _prepare(state_dir: Path) -> tuple[Path, Path]:
    state_dir.mkdir(parents=True, exist_ok=True)
    address = state_dir / "address"
    address.unlink(missing_ok=True)
    return address, state_dir / "server.log"


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])
