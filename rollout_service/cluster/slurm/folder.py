"""The folder of a job: the place where its parts, and the commands that watch it, find each other.

Only its owner can read it; every file appears whole; a part that has ended in order is no longer listed. The record of
a part that was killed stays, so readers ask the part whether it still answers. A shared file system may fail for a
moment: changes of records then log that, since it must end no part of a job.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import write_private
from rollout_service.cluster.slurm.spec import JobSpec

log = structlog.get_logger(__name__)

KEY_BYTES = 32
TAIL_BYTES, MAX_TAIL_BYTES = 1 << 16, 1 << 26
MAX_NAME_CHARS = 64
"""The settings allow no longer name of a node; a job's is part of it."""


class Published(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    url: str
    job: str = ""
    node: str = ""


class StartFailure(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    starts: int
    """Failed starts in a row."""
    exit_code: int | None
    """None if the program itself could not be started, or did not answer in time."""
    reason: str
    """The last line of its log, or what went wrong."""


class Submitted(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    job: str
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder, which every node of the job sees."""

    path: Path

    def create(self, key: str | None = None) -> None:
        """Make the folder and its key, unless they exist; `key` replaces the one that is there.

        Raises:
            ConfigurationError: The folder cannot be written.
        """
        try:
            for name in ("", "logs", "nodes", "engines", "failures", "redis", "state", "shared"):
                (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            if key is not None or not self.key_file.exists():
                key = key or secrets.token_urlsafe(KEY_BYTES)
                write_private(self.keys_file, f'[[keys]]\nname = "job"\nkey = "{key}"\n'.encode())
                write_private(self.key_file, key.encode())
        except OSError as error:
            raise ConfigurationError(
                f"the job's folder {self.path} cannot be written: {error.strerror}",
                hint="Choose a folder on the shared file system with --folder.",
            ) from None

    @property
    def key_file(self) -> Path:
        return self.path / "key"

    @property
    def keys_file(self) -> Path:
        """The same key as the service reads it."""
        return self.path / "keys.toml"

    @property
    def more_script(self) -> Path:
        """The script of the jobs that add nodes to this one."""
        return self.path / "more.sh"

    @property
    def key(self) -> str:
        return self.key_file.read_text()

    def state(self, slot: int | None) -> Path:
        """Return a service's state folder: it belongs to a number, since a requeued job may get other nodes."""
        return self.path / "state" if slot is None else self.path / "state" / f"node-{slot}"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def save(self, submitted: Submitted) -> None:
        write_private(self.path / "job.json", submitted.model_dump_json(indent=2).encode())

    def load(self) -> Submitted:
        """
        Raises:
            ConfigurationError: The folder is not a job's.
        """
        try:
            return Submitted.model_validate_json((self.path / "job.json").read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigurationError(
                f"{self.path} is not the folder of a job: {error}",
                hint="Name a job with its folder, or look for it with `rollout-service slurm status`.",
            ) from None

    def publish(self, kind: str, part: Published) -> bool:
        """List a part as `nodes` or `engines`, which is its kind; return whether that was possible."""
        return self._write(kind, part.name, part)

    def withdraw(self, kind: str, name: str) -> None:
        _change(lambda: self._record(kind, name).unlink(missing_ok=True))

    def forget(self, kind: str) -> None:
        """Withdraw all parts, of whichever job."""
        for file in (self.path / kind).glob("*.json"):
            file.unlink(missing_ok=True)

    def published(self, kind: str) -> list[Published]:
        """Return the listed parts by name.

        Raises:
            OSError: The folder cannot be read, which says nothing about the parts.
        """
        return [Published.model_validate(record) for record in self._records(kind)]

    def fail(self, failure: StartFailure) -> None:
        """Say why a part does not run, until it is withdrawn from `failures`."""
        self._write("failures", failure.name, failure)

    def failures(self) -> list[StartFailure]:
        """
        Raises:
            OSError: The folder cannot be read.
        """
        return [StartFailure.model_validate(record) for record in self._records("failures")]

    def _record(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{name}.json"

    def _write(self, kind: str, name: str, record: BaseModel) -> bool:
        return _change(lambda: write_private(self._record(kind, name), record.model_dump_json().encode()))

    def _records(self, kind: str) -> list[object]:
        found = []
        for file in sorted((self.path / kind).glob("*.json")):
            try:
                found.append(json.loads(file.read_bytes()))
            except FileNotFoundError:
                continue
        return found


def _change(change: Callable[[], None]) -> bool:
    """Return whether the change was made; log why if not."""
    try:
        change()
    except OSError as error:
        log.warning("the job's folder cannot be written", error=str(error))
        return False
    return True


def own_address() -> str:
    """Return the address at which the job's other nodes reach this one."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    # Some systems list their own name with a loopback address; the one that leads to the job's first node works.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "192.0.2.1"), 9))
        except OSError:
            return address
        return str(probe.getsockname()[0])


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def joined_name(node: str, job: str) -> str:
    """Return the name that a node of a job has in the cluster that it joined: the end of both, if they are too long."""
    return f"{node}-{job}"[-MAX_NAME_CHARS:].lstrip("._-")


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, or those of its last `MAX_TAIL_BYTES`; it may be larger than the memory."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        most, tail = min(size, MAX_TAIL_BYTES), TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            lines = file.read(tail).decode(errors="replace").splitlines()
            if len(lines) > count or tail >= most:
                return lines[-count:]
            tail = min(most, 4 * tail)
