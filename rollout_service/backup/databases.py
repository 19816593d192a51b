"""Copies of SQLite databases that services have open.

Guarantees: databases that are pinned together are copied as they all were at one moment, however long the copies take;
the services go on meanwhile. A copy is whole, or an error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rollout_service.base.errors import StoreError
from rollout_service.base.private_files import make_private
from rollout_service.store.sqlite.connection import explain

LOCK_SECONDS = 60.0
"""How long the writer of a database may take to let others have it."""


class PinnedDatabases:
    """Databases as they were when they were pinned."""

    def __init__(self, readers: dict[Path, sqlite3.Connection]) -> None:
        self._readers = readers

    def copy(self, source: Path, target: Path) -> None:
        """Copy a database to a new file.

        Raises:
            StoreError: It is damaged, or cannot be read or copied.
            OSError: The file cannot be created.
        """
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
        """Return the number of rows of a table."""
        (count,) = self._readers[source].execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - a constant
        return int(count)


@contextmanager
def pinned(databases: Sequence[Path]) -> Iterator[PinnedDatabases]:
    """Pin databases at one moment, until the end of the block; nothing is written to any of them at that moment.

    Raises:
        StoreError: One cannot be read.
    """
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
    # Only a database that exists: a backup must not make an empty one.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=LOCK_SECONDS
    )
