"""Runs the upgrades of a schema.

Guarantees: an upgrade is one transaction, so one that a crash interrupts has not happened, and begins again at the next
start. It takes a bounded amount of memory, whatever the database has, and says in the log how far it is if it takes
longer than a few seconds.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

ROWS_AT_ONCE = 5_000
"""How many rows of a table one statement changes."""
PROGRESS_SECONDS = 5.0
_STEPS = 1_000_000
"""How many steps of SQLite's machine may run between two looks at the clock: some hundredths of a second."""


@dataclass(frozen=True, slots=True)
class ForRows:
    """A statement that is run for all rows of a table, some at a time."""

    table: str
    statement: str
    """It changes the rows whose `seq` is above `:after` and at most `:until`."""


Migration = str | Sequence[str | ForRows]
"""A script, or several that follow each other."""


class _Progress:
    """Says in the log how far an upgrade is."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._begun = self._said_at = time.monotonic()
        self.rows, self.of = 0, 0

    def tell(self) -> None:
        """Say it if the last time is a while ago."""
        now = time.monotonic()
        if now - self._said_at >= PROGRESS_SECONDS:
            self._said_at = now
            self._log("upgrading the store")

    def end(self) -> None:
        """Say that it is done if it has taken a while."""
        if time.monotonic() - self._begun >= PROGRESS_SECONDS:
            self._log("upgraded the store")

    def _log(self, what: str) -> None:
        seconds = round(time.monotonic() - self._begun, 1)
        log.info(what, schema_version=self._version, rows=self.rows, of=self.of, seconds=seconds)


def run_migration(connection: sqlite3.Connection, migration: Migration, last: str, *, version: int) -> None:
    """Upgrade a database to a version of its schema, in one transaction that ends with the script `last`.

    Raises:
        sqlite3.Error: The file cannot be read or written; then nothing has changed.
    """
    progress = _Progress(version)
    connection.set_progress_handler(progress.tell, _STEPS)
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for part in [migration] if isinstance(migration, str) else migration:
                _run(connection, part, progress)
            _run(connection, last, progress)
        except BaseException:
            if connection.in_transaction:  # SQLite ends it by itself if the disk is full, for example
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    finally:
        connection.set_progress_handler(None, 0)
    progress.end()


def _run(connection: sqlite3.Connection, part: str | ForRows, progress: _Progress) -> None:
    if isinstance(part, str):
        for statement in _statements(part):
            connection.execute(statement)
        return
    (progress.of,) = connection.execute(f"SELECT coalesce(max(seq), 0) FROM {part.table}").fetchone()  # noqa: S608
    for after in range(0, progress.of, ROWS_AT_ONCE):
        connection.execute(part.statement, {"after": after, "until": after + ROWS_AT_ONCE})
        progress.rows = min(after + ROWS_AT_ONCE, progress.of)
        progress.tell()


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script; `executescript` would commit what was done before."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
