"""The API's current keys: those of the settings, and those of a file that may change while the service runs.

Guarantees: looking up a key takes the same time whether it is right or wrong. A changed file takes effect within
seconds, or at once after SIGHUP. An invalid file changes nothing, and is logged and counted.
"""

from __future__ import annotations

import hmac
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskStatus

from rollout_service.base.errors import ConfigurationError
from rollout_service.http.api_keys import ApiKey, check_unique, read_keys

log = structlog.get_logger(__name__)

POLL_SECONDS = 2.0
READABLE_BY_OTHERS = 0o077

FileVersion = tuple[int, int, int, int]


class Keyring:
    """The keys of one server."""

    def __init__(
        self,
        fixed: Sequence[ApiKey],
        file: Path | None = None,
        *,
        reloaded: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Read the file; `reloaded` is called after each later reading with whether it succeeded.

        Raises:
            ConfigurationError: The file cannot be used.
        """
        self._fixed = list(fixed)
        self._file = file.expanduser() if file is not None else None
        self._reloaded = reloaded
        self._version = self._read_version()
        self._keys = self._read()
        self._warn_of_readers()

    @property
    def is_needed(self) -> bool:
        """Whether the API requires a key."""
        return bool(self._keys)

    def find(self, value: str) -> ApiKey | None:
        """Return the key with this value, if there is one."""
        digest = sha256(value.encode()).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(digest, known):
                found = key
        return found

    def reload(self) -> None:
        """Read the file again; an invalid file leaves the keys as they are."""
        try:
            self._keys = self._read()
        except ConfigurationError as error:
            log.error("keys file is invalid; keeping the previous keys", error=str(error), hint=error.hint)
            self._reloaded(False)
        else:
            log.info("keys reloaded", file=str(self._file), names=[key.name for _, key in self._keys])
            self._reloaded(True)
        self._warn_of_readers()

    def _warn_of_readers(self) -> None:
        with suppress(OSError):  # a file that is gone is logged as invalid
            if self._file is not None and self._file.stat().st_mode & READABLE_BY_OTHERS:
                log.warning(
                    "other users can read the keys file", file=str(self._file), hint=f"chmod 600 {self._file}"
                )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reload the file whenever it changes, while the block runs."""
        if self._file is None:
            yield
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._poll)
            await tasks.start(self._listen)
            yield
            tasks.cancel_scope.cancel()

    async def _poll(self) -> None:
        while True:
            await anyio.sleep(POLL_SECONDS)
            version = await anyio.to_thread.run_sync(self._read_version)
            if version != self._version:
                self._version = version
                await anyio.to_thread.run_sync(self.reload)

    async def _listen(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                await anyio.to_thread.run_sync(self.reload)

    def _read_version(self) -> FileVersion | None:
        """Return a value that changes whenever the file does."""
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode) if found else None

    def _read(self) -> list[tuple[bytes, ApiKey]]:
        keys = [*self._fixed, *(read_keys(self._file) if self._file is not None else [])]
        try:
            check_unique(keys)
        except ValueError as error:
            raise ConfigurationError(f"{error}, in the settings or in {self._file}") from None
        return [(sha256(key.key.get_secret_value().encode()).digest(), key) for key in keys]
