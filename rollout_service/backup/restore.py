"""Restores a backup to where nothing is yet.

Nothing is written before the whole backup was compared with its manifest and every place was seen to be empty; after an
error, unfinished files are removed; no service opens a state folder or a Redis before all of the backup is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollout_service.backup.manifest import STATES, Manifest, Places, SharedStore, copy, copy_shared, shared_files
from rollout_service.base import private_files
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.base.private_files import make_private, open_state_folder
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.sqlite.connection import FileClaim

_LOGS = ("-wal", "-journal")
"""SQLite would replay these files over a database of the same name."""


def restore_backup(backup: Path, places: Places) -> Manifest:
    """
    Raises:
        ConfigurationError: The backup is damaged, does not fit the places, or one of them has data.
        StoreError: A place cannot be written, or is in use.
    """
    manifest = Manifest.read(backup)
    targets = _targets(manifest, places)
    _check_fit(manifest, places)
    shared = places.shared if manifest.shards else ()  # otherwise another backup has the store
    for folder in targets.values():
        _check_empty(folder)
    for store in shared:
        _check_shared_empty(store)
    try:
        with ExitStack() as undo:
            _begin(targets.values(), shared, undo)
            for store in shared:
                _restore_shared(backup, store, undo)
            for name, state in targets.items():
                _restore_state(backup / STATES / name, state, undo)
            for name, document in places.documents.items():
                if name in manifest.files:
                    copy(backup / name, document)
            undo.pop_all()
        _end(targets.values(), shared)
    except OSError as error:
        raise StoreError(
            f"the backup cannot be restored: {error}", hint="What was written is removed. Try again."
        ) from error
    return manifest


def _targets(manifest: Manifest, places: Places) -> Mapping[str, Path]:
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
    placeless = [f"{one.copied}/" for one in places.shared if one.files is None]
    if manifest.shards and not places.shared:
        raise ConfigurationError(
            "the backup is of services that share a Redis", hint="Set [store] url to an empty one."
        )
    if manifest.shards not in (0, len(places.shared)):
        raise ConfigurationError(
            f"the backup is of a store of {manifest.shards} shards, and the settings name {len(places.shared)}",
            hint="Give [store] url and shards as many.",
        )
    if has_store and not places.owns_store:
        raise ConfigurationError(
            "the backup is of a service with a store of its own",
            hint="Leave [store] url out of the settings.",
        )
    if any(name.startswith(folder) for name in manifest.files for folder in placeless):
        raise ConfigurationError(
            "the backup has the files of a shared folder or bucket",
            hint="Set [store] folder to an empty folder, or [store] objects to an unused prefix.",
        )


def _check_empty(state: Path) -> None:
    kept = [*private_files.DATABASES, *private_files.DOCUMENTS, private_files.RESTORING]
    kept += [name + log for name in private_files.DATABASES for log in _LOGS]
    if found := [name for name in kept if (state / name).exists()]:
        raise ConfigurationError(
            f"the state folder {state} has data: {', '.join(found)}",
            hint="Stop its service and move these files away, or name another folder with --state-dir.",
        )


def _check_shared_empty(store: SharedStore) -> None:
    from rollout_service.backup import redis_dump

    redis_dump.check_empty(store.redis)
    if store.files is not None and any(shared_files(store.files)):
        raise ConfigurationError(f"{store.files.texts.subject} has files of a store", hint=store.files.texts.unused)


def _begin(states: Iterable[Path], shared: Iterable[SharedStore], undo: ExitStack) -> None:
    """Keep services from what is not all there until `_end`."""
    for state in states:
        open_state_folder(state)
        undo.callback((state / private_files.RESTORING).unlink, missing_ok=True)
        make_private(state / private_files.RESTORING)
    for store in shared:
        from rollout_service.backup import redis_dump  # the package of Redis may be missing

        undo.callback(redis_dump.remove, store.redis)
        redis_dump.begin_restore(store.redis)


def _end(states: Iterable[Path], shared: Iterable[SharedStore]) -> None:
    for store in shared:
        from rollout_service.backup import redis_dump  # the package of Redis may be missing

        redis_dump.end_restore(store.redis)
    for state in states:
        (state / private_files.RESTORING).unlink()


def _restore_shared(backup: Path, store: SharedStore, undo: ExitStack) -> None:
    from rollout_service.backup import redis_dump

    if (files := store.files) is not None and (backup / store.copied).exists():
        undo.callback(lambda: files.delete(*shared_files(files)))
        copy_shared(SharedFiles(backup / store.copied), files)
    redis_dump.load(store.redis, backup / store.dump)


def _restore_state(source: Path, state: Path, undo: ExitStack) -> None:
    with _claimed(state):
        for path in source.iterdir():
            undo.callback((state / path.name).unlink, missing_ok=True)
            copy(path, state / path.name)


@contextmanager
def _claimed(state: Path) -> Iterator[None]:
    """Keep services from opening the databases of a folder."""
    claims: list[FileClaim] = []
    try:
        claims += (FileClaim(state / name) for name in private_files.DATABASES)
        yield
    finally:
        for claim in claims:
            claim.release()
