"""The schema of the store's files.

The database itself enforces the invariants, by constraints and triggers, so no code path can break them.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace
from typing import Literal, Self

from rollout_service.base.errors import StoreError
from rollout_service.store.sqlite.schema.rollouts import EVENTS, ROLLOUTS
from rollout_service.store.sqlite.schema.runs import RUNS

Disk = Literal["local", "network"]
"""Whether a file is on a disk of this host, or on a file system that other hosts see too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSchema:
    """The schema of a database file, and the durability of its writes."""

    tables: str
    """The script that creates the tables, indexes and triggers of a new file."""
    application_id: int
    """The mark of such files."""
    version: int = 1
    has_events: bool = False
    """Whether it has the table `events`, whose newest id each commit reports."""
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """`FULL` keeps each commit through a loss of power, `NORMAL` through the end of the process alone."""
    page_size: int = 4096
    secure_delete: bool = False
    """Whether deleted content is overwritten."""
    journal_mode: Literal["WAL", "TRUNCATE"] = "WAL"
    """`WAL` needs an index in memory that all openers share, which a file system of several hosts cannot give them."""

    def on_disk(self, disk: Disk) -> Self:
        """Return the same schema for a file on such a disk."""
        return replace(self, journal_mode="WAL" if disk == "local" else "TRUNCATE")


STORE = DatabaseSchema(tables=EVENTS + ROLLOUTS + RUNS, application_id=0x526F6C6C, has_events=True)
"""The store of rollouts and runs; its mark is "Roll" in ASCII."""


def prepare(connection: sqlite3.Connection, schema: DatabaseSchema = STORE) -> None:
    """Create the tables of a new database, in one transaction; check that any other has this schema.

    Raises:
        StoreError: The file belongs to another program or to a release with another schema.
        sqlite3.Error: The file cannot be read or written.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not tables:
        marks = f"PRAGMA application_id = {schema.application_id}; PRAGMA user_version = {schema.version};"
        connection.executescript(f"BEGIN IMMEDIATE; {schema.tables} {marks} COMMIT;")
    elif application != schema.application_id:
        raise StoreError(
            "the store's file is a database of another program",
            hint="Use another state directory, or move that file away.",
        )
    # A later version of the schema would upgrade files of earlier ones here.
    elif version != schema.version:
        raise StoreError(
            f"the store's file has schema version {version}, but this release supports only {schema.version}",
            hint="Run the release that wrote it, or use another state directory.",
        )
