"""Makes a backup of services, which may be at work.

The backup has everything as it was at one moment, of all its state folders and of the stores that the services share;
it is complete, or it has no manifest. Nothing of the services is changed, and none of them waits for longer than a
moment, unless its database has no log that readers can use meanwhile (`[store] disk = "network"`).
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rollout_service import __version__
from rollout_service.backup.manifest import STATES, Manifest, Places, copy, copy_shared, describe_all
from rollout_service.base import private_files
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.base.private_files import check_whole, make_private
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.sqlite.connection import explain

COUNTED = {"rollouts": private_files.STORE, "runs": private_files.STORE, "sessions": private_files.LIVE_STORE}


def make_backup(places: Places, target: Path) -> Manifest:
    """Make a backup in a folder that is new or empty.

    Raises:
        ConfigurationError: The folder is not empty, or there is nothing to back up.
        StoreError: A store cannot be read, or the folder cannot be written.
    """
    _check(places, target)
    try:
        return _Backup(places, target).make()
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise StoreError(
            f"the backup in {target} cannot be written: {error}",
            hint="Check the free space there, and that every folder of the service can be read.",
        ) from error


def _check(places: Places, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is not empty", hint="Name a new folder for the backup.")
    for state in places.states.values():
        check_whole(state)
        if not (state / private_files.LIVE_STORE).exists():
            raise ConfigurationError(
                f"{state} is not the state folder of a service",
                hint="Pass its settings file with --config, or its folder with --state-dir.",
            )


class _Backup:
    def __init__(self, places: Places, target: Path) -> None:
        self._places = places
        self._target = target
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._databases = [
            state / name for state in places.states.values() for name in places.databases if (state / name).exists()
        ]

    def make(self) -> Manifest:
        self._target.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._copy_folders()  # most of it is on the way before the moment
        with ExitStack() as stack:
            databases, at = self._at_one_moment(stack), datetime.now(UTC)
            self._copy_folders()  # what Redis refers to by now
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
        if not self._places.shared:
            return stack.enter_context(pinned(self._databases))
        from rollout_service.backup import redis_dump

        found: list[PinnedDatabases] = []
        counts = redis_dump.dump(
            [(one.redis, self._target / one.dump) for one in self._places.shared],
            lambda: found.append(stack.enter_context(pinned(self._databases))),
        )
        self._counts.update(counts)
        return found[0]

    def _copy_folders(self) -> None:
        for one in self._places.shared:
            if one.files is not None:
                copy_shared(one.files, SharedFiles(self._target / one.copied))

    def _copy_state(self, name: str, state: Path, databases: PinnedDatabases) -> None:
        copied = self._target / STATES / name
        copied.parent.mkdir(mode=0o700, exist_ok=True)
        copied.mkdir(mode=0o700)
        for database in (path for path in self._databases if path.parent == state):
            databases.copy(database, copied / database.name)
            for table in (table for table, file in COUNTED.items() if file == database.name):
                self._counts[table] += databases.count(database, table)
        for document in private_files.DOCUMENTS:
            if (state / document).exists():
                copy(state / document, copied / document)


LOCK_SECONDS = 60.0
"""How long the writer of a database may take to let others have it."""


class PinnedDatabases:
    """Databases as they all were at one moment, however long their copies take; those with a log go on meanwhile."""

    def __init__(self, readers: dict[Path, sqlite3.Connection]) -> None:
        self._readers = readers

    def copy(self, source: Path, target: Path) -> None:
        """Make a whole copy, or raise an error."""
        make_private(target)
        try:
            with closing(sqlite3.connect(target, isolation_level=None)) as copy:
                self._readers[source].backup(copy)
                [(found,)] = copy.execute("PRAGMA quick_check(1)").fetchall()
        except sqlite3.Error as error:
            raise explain(error) from error
        if found != "ok":
            raise StoreError(
                f"{source} is damaged: {found}",
                hint="Rescue it with `sqlite3 FILE .recover`, or use an older backup.",
            )

    def count(self, source: Path, table: str) -> int:
        (count,) = self._readers[source].execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - a constant
        return int(count)


@contextmanager
def pinned(databases: Sequence[Path]) -> Iterator[PinnedDatabases]:
    """Pin databases at one moment, until the end of the block; nothing is written to any of them at that moment."""
    readers: dict[Path, sqlite3.Connection] = {}
    locks: list[sqlite3.Connection] = []
    try:
        for path in databases:
            locks.append(_connect(path))
            readers[path] = _connect(path)
        for lock in locks:
            lock.execute("BEGIN IMMEDIATE")
        for reader in readers.values():
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # the transaction begins here
        for lock in locks:
            lock.execute("ROLLBACK")
        yield PinnedDatabases(readers)
    except sqlite3.Error as error:
        raise explain(error) from error
    finally:
        for connection in (*locks, *readers.values()):
            connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    # A backup must not make an empty database.
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=LOCK_SECONDS)
