"""Restores a backup to where nothing is yet.

Guarantees: nothing is written before the whole backup was compared with its manifest and every place was seen to be
empty; after an error, unfinished files are removed; no service can open a state folder that is being restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_service.backup.manifest import (
    FOLDER,
    REDIS_DUMP,
    STATES,
    Manifest,
    Places,
    copy,
    copy_shared,
    shared_files,
)
from rollout_service.base import private_files
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.base.private_files import open_state_folder
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.sqlite.connection import FileClaim

if TYPE_CHECKING:  # the package of Redis may be missing
    from rollout_service.store.redis import RedisConfig

_LOGS = ("-wal", "-journal")
"""Suffixes of files that SQLite would replay over a database of the same name."""


def restore_backup(backup: Path, places: Places) -> Manifest:
    """Restore a backup; its services can be started afterwards.

    Raises:
        ConfigurationError: The backup is damaged, does not fit the places, or one of them has data.
        StoreError: A place cannot be written, or is in use.
    """
    manifest = Manifest.read(backup)
    targets = _targets(manifest, places)
    _check_fit(manifest, places)
    redis = places.redis if manifest.has_redis else None  # otherwise another backup has the store
    for folder in targets.values():
        _check_empty(folder)
    if redis is not None:
        _check_shared_empty(redis, places.files)
    try:
        with ExitStack() as undo:
            if redis is not None:
                _restore_shared(backup, redis, places.files, undo)
            for name, state in targets.items():
                _restore_state(backup / STATES / name, state, undo)
            undo.pop_all()
        for name, document in places.documents.items():
            if name in manifest.files:
                copy(backup / name, document)
    except OSError as error:
        raise StoreError(
            f"the backup cannot be restored: {error}", hint="What was written is removed. Try again."
        ) from error
    return manifest


def _targets(manifest: Manifest, places: Places) -> Mapping[str, Path]:
    """Return the folder that each state folder of the backup goes to.

    Raises:
        ConfigurationError: There are other ones.
    """
    if len(manifest.states) == len(places.states) == 1:
        return dict(zip(manifest.states, places.states.values(), strict=True))
    if not set(manifest.states) <= set(places.states):
        raise ConfigurationError(
            f"the backup has the state of {len(manifest.states)} nodes: {', '.join(manifest.states)}",
            hint="Restore it to a job of Slurm with as many nodes: --job.",
        )
    return {name: places.states[name] for name in manifest.states}


def _check_fit(manifest: Manifest, places: Places) -> None:
    has_store = any(name.endswith(f"/{private_files.STORE}") for name in manifest.files)
    has_folder = any(name.startswith(f"{FOLDER}/") for name in manifest.files)
    if manifest.has_redis and places.redis is None:
        raise ConfigurationError(
            "the backup is of services that share a Redis", hint="Set [store] url to an empty one."
        )
    if has_store and not places.owns_store:
        raise ConfigurationError(
            "the backup is of a service with a store of its own",
            hint="Leave [store] url out of the settings.",
        )
    if has_folder and places.files is None:
        raise ConfigurationError(
            "the backup has the files of a shared folder or bucket",
            hint="Set [store] folder to an empty folder, or [store] objects to an unused prefix.",
        )


def _check_empty(state: Path) -> None:
    kept = [*private_files.DATABASES, *private_files.DOCUMENTS]
    kept += [name + log for name in private_files.DATABASES for log in _LOGS]
    if found := [name for name in kept if (state / name).exists()]:
        raise ConfigurationError(
            f"the state folder {state} has data: {', '.join(found)}",
            hint="Stop its service and move these files away, or name another folder with --state-dir.",
        )


def _check_shared_empty(redis: RedisConfig, files: SegmentFiles | None) -> None:
    from rollout_service.backup import redis_dump

    redis_dump.check_empty(redis)
    if files is not None and any(shared_files(files)):
        raise ConfigurationError(f"{files.texts.subject} has files of a store", hint=files.texts.unused)


def _restore_shared(backup: Path, redis: RedisConfig, files: SegmentFiles | None, undo: ExitStack) -> None:
    from rollout_service.backup import redis_dump

    if files is not None and (backup / FOLDER).exists():
        undo.callback(_empty, files)
        copy_shared(SharedFiles(backup / FOLDER), files)
    undo.callback(redis_dump.remove, redis)
    redis_dump.load(redis, backup / REDIS_DUMP)


def _restore_state(source: Path, state: Path, undo: ExitStack) -> None:
    with _claimed(state):
        for path in source.iterdir():
            undo.callback((state / path.name).unlink, missing_ok=True)
            copy(path, state / path.name)


def _empty(files: SegmentFiles) -> None:
    files.delete(*shared_files(files))


@contextmanager
def _claimed(state: Path) -> Iterator[None]:
    """Keep services from opening the databases of a folder within the block.

    Raises:
        StoreError: One of them is in use.
    """
    open_state_folder(state)
    claims: list[FileClaim] = []
    try:
        claims += (FileClaim(state / name) for name in private_files.DATABASES)
        yield
    finally:
        for claim in claims:
            claim.release()
