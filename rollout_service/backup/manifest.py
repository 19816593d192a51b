"""The list of a backup's contents, with the hash of each file.

A folder has a manifest only once everything else in it is complete and on the disk; nothing is restored from one whose
files are not exactly those that were written. Functions on files raise OSError if one cannot be read or written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_service.base import private_files
from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import make_private, write_private
from rollout_service.settings import Settings
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.ledger import FILE_NAME
from rollout_service.store.segments.proof import MARK_FILE

if TYPE_CHECKING:
    from rollout_service.store.redis import RedisConfig

MANIFEST = "manifest.json"
REDIS_DUMP = "redis.dump"
STATES, FOLDER = "states", "folder"
"""Folders of a backup: of state folders, and of the files of a shared folder or bucket."""
_READ_BYTES = 1 << 20


class BackedUpFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    release: str
    at: datetime
    """The moment whose state the backup has."""
    states: list[str]
    counts: Mapping[str, int]
    """Rollouts, runs and live sessions."""
    files: Mapping[str, BackedUpFile]
    """Keyed by paths in the backup."""

    @property
    def shards(self) -> int:
        """The number of shards of a store that services share."""
        return sum(Path(name).name == REDIS_DUMP for name in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def write(self, backup: Path) -> None:
        write_private(backup / MANIFEST, self.model_dump_json(indent=2).encode())

    @classmethod
    def read(cls, backup: Path) -> Manifest:
        """Return the manifest after comparing all files with it.

        Raises:
            ConfigurationError: The folder is not a complete backup, or a file of it was changed or is missing.
        """
        try:
            manifest = cls.model_validate_json((backup / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise ConfigurationError(
                f"{backup} is not a backup, or one that was cut off: it has no {MANIFEST}",
                hint="Name the folder that `rollout-service backup` completed.",
            ) from None
        except (OSError, ValidationError) as error:
            raise ConfigurationError(
                f"{backup / MANIFEST} cannot be read: {error}",
                hint="Use another backup, or the release that made this one.",
            ) from error
        manifest._check(backup)
        return manifest

    def _check(self, backup: Path) -> None:
        for name, expected in self.files.items():
            try:
                found = describe(backup / name)
            except OSError as error:
                raise _damaged(f"{name} cannot be read: {error.strerror}") from error
            if found != expected:
                raise _damaged(f"{name} is not what was written")
        if other := {_name(backup, path) for path in _files(backup)} - self.files.keys() - {MANIFEST}:
            raise _damaged(f"{min(other)} is not part of it")


def describe(path: Path) -> BackedUpFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return BackedUpFile(bytes=file.tell(), sha256=digest)


def describe_all(backup: Path) -> dict[str, BackedUpFile]:
    """Return all files by their paths; each is on the disk afterwards."""
    return {_name(backup, path): _flushed(path) for path in sorted(_files(backup))}


def _name(backup: Path, path: Path) -> str:
    return path.relative_to(backup).as_posix()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _flushed(path: Path) -> BackedUpFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return describe(path)


def _damaged(why: str) -> ConfigurationError:
    return ConfigurationError(f"the backup is damaged: {why}", hint="Nothing was restored. Use another backup.")


def copy(source: Path, target: Path) -> None:
    """Copy a file that is replaced as a whole, or only grows; the copy is private, and on the disk afterwards."""
    make_private(target)
    with source.open("rb") as read, target.open("r+b") as write:
        shutil.copyfileobj(read, write, _READ_BYTES)
        write.truncate()
        write.flush()
        os.fsync(write.fileno())


def copy_shared(source: SegmentFiles, target: SegmentFiles) -> None:
    """Copy the files of trajectories that the target lacks, or has less of."""
    target.prepare()
    copied = target.sizes()
    for name, size in shared_files(source).items():
        if copied.get(name, -1) < size:
            try:
                target.store(name, source.read(name, 0, size))
            except FileNotFoundError:  # the store deleted it: nothing refers to it any more
                target.delete(name)


def shared_files(files: SegmentFiles) -> dict[str, int]:
    """Return the sizes of the files that a store keeps in its shared folder or bucket."""
    try:
        found = files.sizes()
    except FileNotFoundError:  # there is no such folder
        return {}
    return {name: size for name, size in found.items() if name == MARK_FILE or FILE_NAME.fullmatch(name)}


ONLY = "state"


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A Redis or a shard that services share, with its shared folder or bucket."""

    redis: RedisConfig
    files: SegmentFiles | None = None

    @property
    def folder(self) -> Path:
        return Path(f"shard-{self.redis.shard}" if self.redis.shards > 1 else "")

    @property
    def dump(self) -> Path:
        return self.folder / REDIS_DUMP

    @property
    def copied(self) -> Path:
        return self.folder / FOLDER


@dataclass(frozen=True, slots=True)
class Places:
    states: Mapping[str, Path]
    """Keyed by their names in a backup."""
    owns_store: bool = True
    """Whether the store is in the state folder, which is then the only one."""
    shared: Sequence[SharedStore] = ()
    """The store that services share, or its shards; empty if there is none, or if it is in another backup."""
    documents: Mapping[str, Path] = field(default_factory=dict)
    """Other files, keyed by paths in a backup; restoring one replaces it."""

    @property
    def databases(self) -> tuple[str, ...]:
        return private_files.DATABASES if self.owns_store else (private_files.LIVE_STORE,)

    @classmethod
    def of(cls, settings: Settings, *, with_store: bool = True) -> Self:
        """Return the places of the node with these settings; `with_store` includes a store that it shares."""
        states = {ONLY: settings.state_dir.expanduser()}
        if not settings.store.url:
            return cls(states)
        if not with_store:
            return cls(states, owns_store=False)
        from rollout_service.store.redis import RedisConfig
        from rollout_service.store.segments.files import files_of

        configs = RedisConfig.of(settings.store)
        shared = [SharedStore(one, files_of(settings.store, one.shard)) for one in configs]
        return cls(states, owns_store=False, shared=shared)
