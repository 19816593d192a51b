"""The API's current keys: those of the settings, and those of a file that may change while the service runs.

Looking up a key takes the same time whether it is right or wrong. A changed file takes effect within seconds, or at
once after SIGHUP. An invalid file changes nothing, and is logged and counted. A key is too long to be guessed, and
appears in no message and no representation. A route that is not listed here needs the role `admin`, so a new route is
never open by mistake.
"""

from __future__ import annotations

import hmac
import re
import signal
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskStatus
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from rollout_service.base.errors import ConfigurationError

log = structlog.get_logger(__name__)

MIN_LENGTH = 16
MAX_LENGTH = 512
KEY_COMMAND = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
ALPHABET = re.compile(r"[!-+\--~]+")
"""Visible ASCII without the comma, which separates keys in a variable."""
READ_METHODS = frozenset({"GET", "HEAD"})
SUBMIT_PATHS = ("/v1/rollouts", "/v1/runs", "/v1/rescore", "/v1/sessions", "/process", "/cancel")
"""The role `submit` may change these and everything below them."""
ADMIN_PATHS = frozenset({"/v1/sessions/canary"})
"""Closed to `submit`, since they decide which weights serve."""


class Role(StrEnum):
    """The role of a key; each role includes those before it."""

    READ = "read"
    """Read everything: rollouts and their trajectories, runs, engines, events, metrics."""
    SUBMIT = "submit"
    """Submit and cancel rollouts, and work with runs and their batches."""
    ADMIN = "admin"
    """Everything: engines, weights, pausing and stopping the service."""

    def allows(self, needed: Role) -> bool:
        roles = list(Role)
        return roles.index(self) >= roles.index(needed)


def needed_role(method: str, path: str) -> Role:
    if method in READ_METHODS:
        return Role.READ
    if path not in ADMIN_PATHS and any(path == start or path.startswith(f"{start}/") for start in SUBMIT_PATHS):
        return Role.SUBMIT
    return Role.ADMIN


class ApiKey(BaseModel):
    """A key of the API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=128)
    """A name for people: error messages show it, and never the key itself."""
    role: Role = Role.ADMIN
    """`read`, `submit` or `admin`."""
    key: SecretStr
    """At least 16 characters of visible ASCII, without a comma."""

    @field_validator("key")
    @classmethod
    def _is_strong(cls, key: SecretStr) -> SecretStr:
        value = key.get_secret_value()
        if not MIN_LENGTH <= len(value) <= MAX_LENGTH:
            raise ValueError(
                f"the key has {len(value)} characters; it needs {MIN_LENGTH} to {MAX_LENGTH}. "
                f"Generate one with `{KEY_COMMAND}`"
            )
        if not ALPHABET.fullmatch(value):
            raise ValueError(f"a key is visible ASCII without spaces and commas; make one with `{KEY_COMMAND}`")
        return key


def name_keys(value: object) -> object:
    """Give each bare value a name and the role `admin`."""
    if not isinstance(value, list):
        return value
    return [
        {"name": f"key-{number}", "key": key} if isinstance(key, str | SecretStr) else key
        for number, key in enumerate(value, start=1)
    ]


def check_unique(keys: Sequence[ApiKey]) -> None:
    """
    Raises:
        ValueError: Two keys share a name or a value.
    """
    for kind, values in (
        ("name", [key.name for key in keys]),
        ("value", [key.key.get_secret_value() for key in keys]),
    ):
        if len(set(values)) < len(values):
            raise ValueError(f"two keys have the same {kind}")


KEYS_HINT = (
    'For each key, write a line [[keys]] and below it name = "NAME", role = "submit" and key = "KEY", on a line each.'
)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey] = Field(min_length=1)


def read_keys(path: Path) -> list[ApiKey]:
    """Read the `[[keys]]` tables, which have `name`, `role`, and `key`.

    Raises:
        ConfigurationError: The file cannot be used; the message says where it is wrong, and never quotes it.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return _File.model_validate(table).keys
    except OSError as error:
        raise ConfigurationError(f"the keys file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigurationError(f"the keys file {path} is not valid TOML", hint=KEYS_HINT) from None
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_input=False)
        )
        raise ConfigurationError(f"the keys file {path}: {wrong}", hint=KEYS_HINT) from None


POLL_SECONDS = 2.0
READABLE_BY_OTHERS = 0o077

FileVersion = tuple[int, int]


def file_version(path: Path) -> FileVersion | None:
    """Return a value that changes whenever a file, its owner or its mode does; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_ino


class Keyring:
    def __init__(
        self,
        fixed: Sequence[ApiKey],
        file: Path | None = None,
        *,
        reloaded: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`reloaded` is called after each later reading with whether it succeeded.

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
        return bool(self._keys)

    def find(self, value: str) -> ApiKey | None:
        digest = sha256(value.encode()).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(digest, known):
                found = key
        return found

    def has(self, key: ApiKey) -> bool:
        """Return whether a key that was found is still the same, with the same role."""
        return any(known is key or known == key for _, known in self._keys)

    def reload(self) -> None:
        """Read the file again; an invalid one leaves the keys as they are."""
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
        with suppress(OSError):  # a missing file is logged as invalid
            if self._file is not None and self._file.stat().st_mode & READABLE_BY_OTHERS:
                log.warning("other users can read the keys file", file=str(self._file), hint=f"chmod 600 {self._file}")

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reload the file whenever it changes."""
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
        return file_version(self._file) if self._file is not None else None

    def _read(self) -> list[tuple[bytes, ApiKey]]:
        keys = [*self._fixed, *(read_keys(self._file) if self._file is not None else [])]
        try:
            check_unique(keys)
        except ValueError as error:
            raise ConfigurationError(f"{error}, in the settings or in {self._file}") from None
        return [(sha256(key.key.get_secret_value().encode()).digest(), key) for key in keys]
