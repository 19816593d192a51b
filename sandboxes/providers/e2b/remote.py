"""E2B's client, in a thread with an event loop of its own, and one sandbox of the server from its creation to its end.

The real client carries everything; the relay is a command whose input and output it streams for as long as the sandbox
lives. It answers 429 and 503 by waiting as long as the server says, within the time of the request.

A sandbox of the server is one task here, which alone creates it and which nobody cancels: it sees that the user has
left, and kills the sandbox. If the answer to a creation is lost, the sandbox is found by its metadata.
"""

import os
import secrets
import shlex
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import e2b
import structlog
from anyio.from_thread import BlockingPortal

from sandboxes.config import E2BConfig
from sandboxes.errors import (
    ImageNotFoundError,
    ProviderUnavailableError,
    SandboxClosedError,
    SandboxConfigError,
    SandboxError,
    SandboxLostError,
    SandboxQuotaError,
    SandboxStartError,
)
from sandboxes.providers.e2b.link import BrokenLinkError, Link
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.task_groups import open_task_group

OWNER, FOLDER, SANDBOX = "rollout-service-owner", "rollout-service-folder", "rollout-service-sandbox"
"""Metadata: which services may sweep a sandbox, whose lock shows that its service lives, and its id. Some servers make
labels of it, so values are short and have only letters, digits and hyphens.
"""
REQUEST_SECONDS = 10.0
KILL_PAUSES = (0.0, 1.0, 4.0)
LEFT_SECONDS = 5.0
"""A creation whose user has left goes on so long: most are over by then, and their sandboxes known."""
RENEW_PAUSE = 5.0
RETRIES = 20
"""Requests that a busy server refused are repeated, until their time is over."""
MOST_PAGES = 100
NOT_FOUND, FIRST_SERVER_ERROR = 404, 500
LOG_BYTES = 64 * 1024
CLIENT_SECONDS = 10.0
"""How long the thread has to kill what is left when the provider is closed."""
log = structlog.get_logger(__name__)


class Client:
    def __init__(self, config: E2BConfig) -> None:
        """
        Raises:
            ProviderUnavailableError: There is no API key.
        """
        self.config = config
        self._options: dict[str, Any] = {
            "api_key": _read_key(config),
            "domain": config.domain,
            "api_url": config.api_url,
            "sandbox_url": config.sandbox_url,
            "debug": False,
            "retries": RETRIES,
        }
        self._portal: BlockingPortal | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._alive: dict[str, float] = {}
        self._seconds = 0.0

    def start(self, work: Any, *arguments: object) -> "Future[Any]":
        """
        Raises:
            SandboxClosedError: The client has been closed.
        """
        with self._lock:
            if self._portal is None:
                ready: Future[BlockingPortal] = Future()
                self._thread = threading.Thread(target=anyio.run, args=(_serve, ready), daemon=True, name="e2b")
                self._thread.start()
                self._portal = ready.result()
        try:
            return self._portal.start_task_soon(work, *arguments)
        except RuntimeError as error:
            raise SandboxClosedError("the provider has been closed") from error

    def close(self) -> None:
        """Wait for the tasks of all sandboxes. Blocks."""
        if self._portal is not None and self._thread is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has been closed before
                self._portal.call(self._portal.stop)
            self._thread.join(CLIENT_SECONDS)

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        return self._seconds + sum(now - began for began in list(self._alive.values()))

    async def create(
        self, template: str, metadata: Mapping[str, str], *, network: bool, seconds: float
    ) -> e2b.AsyncSandbox:
        """Create a sandbox. May raise whatever the client raises."""
        with anyio.fail_after(seconds):
            sandbox = await e2b.AsyncSandbox.create(
                template,
                timeout=self.config.ttl_seconds,
                metadata=dict(metadata),
                allow_internet_access=network,
                idempotency_key=f"{metadata[SANDBOX]}-{secrets.token_hex(8)}",
                request_timeout=seconds,
                **self._options,
            )
        self._alive[sandbox.sandbox_id] = time.monotonic()
        return sandbox

    async def kill(self, sandbox_id: str) -> bool:
        """Return False, and log it, if the server does not do it."""
        failure: Exception | None = None
        for pause in KILL_PAUSES:
            await anyio.sleep(pause)
            try:
                await e2b.AsyncSandbox.kill(sandbox_id, request_timeout=REQUEST_SECONDS, **self._options)
            except Exception as error:  # noqa: BLE001  whatever it is, the next try may succeed
                failure = error
            else:
                failure = None
                break
        else:
            hint = f"the server ends it within {self.config.ttl_seconds} s; the next start tries again"
            log.error("a sandbox could not be killed", sandbox=sandbox_id, error=str(failure), hint=hint)
        self._seconds += time.monotonic() - self._alive.pop(sandbox_id, time.monotonic())
        return failure is None

    async def kill_like(self, metadata: Mapping[str, str]) -> None:
        """Kill sandboxes with this metadata, also one that the server is about to start."""
        for pause in KILL_PAUSES:
            await anyio.sleep(pause)
            with suppress(Exception):
                async for found in self.list(metadata):
                    await self.kill(found.sandbox_id)

    async def sweep(self, owner: str, is_dead: Callable[[str], bool]) -> tuple[int, tuple[str, ...]]:
        """Return how many sandboxes of dead services were killed, and what failed."""
        killed, failures = 0, []
        try:
            async for found in self.list({OWNER: owner}):
                folder = (found.metadata or {}).get(FOLDER, "")
                if await anyio.to_thread.run_sync(is_dead, folder):
                    done = await self.kill(found.sandbox_id)
                    killed += done
                    failures += [] if done else [f"sandbox {found.sandbox_id} of the server was not killed"]
        except Exception as error:  # noqa: BLE001  the service starts without it
            failures.append(f"the server's sandboxes cannot be listed: {type(error).__name__}: {error}")
        return killed, tuple(failures)

    async def list(self, metadata: Mapping[str, str]) -> AsyncIterator[e2b.SandboxInfo]:
        pages = e2b.AsyncSandbox.list(
            e2b.SandboxQuery(metadata=dict(metadata)), request_timeout=REQUEST_SECONDS, **self._options
        )
        for _ in range(MOST_PAGES):
            if not pages.has_next:
                return
            for found in await pages.next_items():
                yield found


@dataclass(slots=True)
class Remote:
    client: Client
    link: Link
    folder: RunFolder
    metadata: Mapping[str, str]
    template: str
    network: bool
    until: float
    """The end of its start, on the monotonic clock."""
    failure: SandboxError | None = None
    """Set if neither its user nor code inside ended it."""
    task: "Future[None] | None" = None

    def start(self, command: Sequence[str]) -> None:
        """Start the task; `command` starts the relay. Blocks for a moment.

        Raises:
            SandboxClosedError: The client has been closed.
        """
        self.task = self.client.start(self._run, command)

    async def _run(self, command: Sequence[str]) -> None:
        try:
            sandbox = await self._create()
        except Exception as error:  # noqa: BLE001  the client's own, and those below it
            self.failure = _as_start_error(error, self.template)
            self.link.close()
            if not _is_refusal(error):  # there may be a sandbox all the same
                await self.client.kill_like(self.metadata)
            return
        try:
            if not self.link.is_left:
                await self._serve(sandbox, command)
        except Exception as error:  # noqa: BLE001  whatever it is, the sandbox cannot be used any more
            self.failure = _as_loss(error)
        finally:
            self.link.close()
            with anyio.CancelScope(shield=True):
                await self.client.kill(sandbox.sandbox_id)

    async def _create(self) -> e2b.AsyncSandbox:
        async def give_up() -> None:
            while not self.link.is_left:  # noqa: ASYNC110  nothing else reads the socket yet
                await anyio.sleep(LEFT_SECONDS / 10)
            await anyio.sleep(LEFT_SECONDS)
            raise TimeoutError("the sandbox was not wanted any more")

        async with open_task_group() as tasks:
            tasks.start_soon(give_up)
            sandbox = await self.client.create(self.template, self.metadata, network=self.network, seconds=self._left)
            tasks.cancel_scope.cancel()
        return sandbox

    @property
    def _left(self) -> float:
        return max(self.until - time.monotonic(), 1.0)

    async def _serve(self, sandbox: e2b.AsyncSandbox, command: Sequence[str]) -> None:
        log_file = self.folder.log

        def note(text: str) -> None:
            if log_file.stat().st_size < LOG_BYTES:
                with log_file.open("a", errors="replace") as file:
                    file.write(text)

        relay = await sandbox.commands.run(
            shlex.join(command),
            background=True,
            stdin=True,
            user="root",
            cwd="/",
            timeout=0,
            request_timeout=self._left,
            on_stdout=self.link.receive,
            on_stderr=note,
            retain_output=False,
        )
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(self._renew, sandbox)
                tasks.start_soon(_wait_for, relay, tasks.cancel_scope)
                await self.link.serve(relay.send_stdin)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(REQUEST_SECONDS):
                await relay.disconnect()

    async def _renew(self, sandbox: e2b.AsyncSandbox) -> None:
        """Put off the end of the sandbox; fail once it is over."""
        ttl = self.client.config.ttl_seconds
        until, pause = time.monotonic() + ttl, ttl / 3
        while True:
            await anyio.sleep(pause)
            began = time.monotonic()
            try:
                await sandbox.set_timeout(ttl, request_timeout=REQUEST_SECONDS)
                until, pause = began + ttl, ttl / 3
            except Exception as error:
                log.warning("a sandbox could not be renewed", sandbox=sandbox.sandbox_id, error=str(error))
                if isinstance(error, e2b.NotFoundException) or time.monotonic() > until:
                    raise
                pause = RENEW_PAUSE


async def _serve(ready: "Future[BlockingPortal]") -> None:
    async with BlockingPortal() as portal:
        ready.set_result(portal)
        await portal.sleep_until_stopped()


async def _wait_for(relay: "e2b.AsyncCommandHandle", scope: anyio.CancelScope) -> None:
    """End with the relay, which code inside may have ended."""
    with suppress(e2b.CommandExitException):
        await relay.wait()
    scope.cancel()


def _read_key(config: E2BConfig) -> str:
    try:
        key = config.api_key_file.read_text() if config.api_key_file else os.environ.get(config.api_key_env, "")
    except OSError as error:
        raise ProviderUnavailableError(f"the file with the API key cannot be read: {error}", hint="") from error
    if not key.strip():
        hint = f"set {config.api_key_env}, or sandbox.api_key_file"
        raise ProviderUnavailableError("there is no key for E2B's API", hint=hint)
    return key.strip()


def _is_refusal(error: Exception) -> bool:
    """Return whether the server has answered that it starts no sandbox."""
    status = getattr(error, "status_code", None)
    answered = isinstance(error, e2b.AuthenticationException | e2b.ServiceBusyException)
    return answered or (status is not None and status < FIRST_SERVER_ERROR)


def _as_start_error(error: Exception, template: str) -> SandboxError:
    said = f"the server started no sandbox: {type(error).__name__}: {error}"
    if isinstance(error, e2b.RateLimitException | e2b.ServiceBusyException):
        return SandboxQuotaError(said)
    if isinstance(error, e2b.AuthenticationException):
        hint = "check the API key, and that api_url or domain is the server that it is for"
        return ProviderUnavailableError(said, hint=hint)
    if getattr(error, "status_code", None) == NOT_FOUND:
        return ImageNotFoundError(said, hint=f"build the template {template!r} on the server")
    if _is_refusal(error):
        return SandboxConfigError(said, hint="see sandbox.template, sandbox.ttl_seconds and the account's limits")
    return SandboxStartError(said, hint="check api_url or domain, and the server's status")


def _as_loss(error: Exception) -> SandboxError:
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, BrokenLinkError):
        return SandboxLostError(f"the sandbox was ended: {error}", hint="look at what the code inside did to it")
    return SandboxLostError(f"the server has lost the sandbox: {type(error).__name__}: {error}")
