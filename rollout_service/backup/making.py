"""Makes a backup of services, which may be at work.

Guarantees: the backup has everything as it was at one moment, of all its state folders and of what the services share;
it is complete, or it has no manifest. Nothing of the services is changed, and none of them waits for longer than a
moment.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rollout_service import __version__
from rollout_service.backup import redis_dump
from rollout_service.backup.databases import PinnedDatabases, pinned
from rollout_service.backup.files import copy, copy_folder
from rollout_service.backup.manifest import FOLDER, REDIS_DUMP, STATES, Manifest, describe_all
from rollout_service.backup.places import Places
from rollout_service.base import state_files
from rollout_service.base.errors import ConfigurationError, StoreError

COUNTED = {"rollouts": state_files.STORE, "runs": state_files.STORE, "sessions": state_files.LIVE_STORE}
"""The tables whose rows are counted, and the databases that have them."""


def make_backup(places: Places, target: Path) -> Manifest:
    """Make a backup in a new folder.

    Raises:
        ConfigurationError: The folder is not empty, or there is nothing to back up.
        StoreError: A store cannot be read, or the folder cannot be written.
    """
    _check(places, target)
    try:
        with _removed_on_error(target):
            return _Backup(places, target).make()
    except OSError as error:
        raise StoreError(
            f"the backup in {target} cannot be written: {error}",
            hint="Check the free space there, and that every folder of the service can be read.",
        ) from error


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _check(places: Places, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is not empty", hint="Name a new folder for the backup.")
    for state in places.states.values():
        if not (state / state_files.LIVE_STORE).exists():
            raise ConfigurationError(
                f"{state} is not the state folder of a service",
                hint="Pass its settings file with --config, or its folder with --state-dir.",
            )


class _Backup:
    """A backup that is being made."""

    def __init__(self, places: Places, target: Path) -> None:
        self._places = places
        self._target = target
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._databases = [
            state / name
            for state in places.states.values()
            for name in places.databases
            if (state / name).exists()
        ]

    def make(self) -> Manifest:
        self._target.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._copy_folder()  # most of it is on the way before the moment
        with ExitStack() as stack:
            databases, at = self._at_one_moment(stack), datetime.now(UTC)
            self._copy_folder()  # what Redis refers to by now
            for name, state in self._places.states.items():
                self._copy_state(name, state, databases)
        for name, document in self._places.documents.items():
            (self._target / name).parent.mkdir(mode=0o700, exist_ok=True)
            copy(document, self._target / name)
        manifest = Manifest(
            release=__version__,
            at=at,
            states=sorted(self._places.states),
            counts=self._counts,
            files=describe_all(self._target),
        )
        manifest.write(self._target)
        return manifest

    def _at_one_moment(self, stack: ExitStack) -> PinnedDatabases:
        """Pin all databases; if the services share a store, at the moment whose state its dump has."""
        if self._places.redis is None:
            return stack.enter_context(pinned(self._databases))
        found: list[PinnedDatabases] = []
        counts = redis_dump.dump(
            self._places.redis,
            self._target / REDIS_DUMP,
            lambda: found.append(stack.enter_context(pinned(self._databases))),
        )
        self._counts.update(counts)
        return found[0]

    def _copy_folder(self) -> None:
        if self._places.folder is not None:
            copy_folder(self._places.folder, self._target / FOLDER)

    def _copy_state(self, name: str, state: Path, databases: PinnedDatabases) -> None:
        copied = self._target / STATES / name
        copied.parent.mkdir(mode=0o700, exist_ok=True)
        copied.mkdir(mode=0o700)
        for database in (path for path in self._databases if path.parent == state):
            databases.copy(database, copied / database.name)
            for table in (table for table, file in COUNTED.items() if file == database.name):
                self._counts[table] += databases.count(database, table)
        for document in state_files.DOCUMENTS:
            if (state / document).exists():
                copy(state / document, copied / document)
