"""The schema of the SQLite store, and its versions.

The database itself enforces the invariants, so no code path can break them. A trigger rejects every change of a
terminal rollout, and triggers write the events and the counts in the transaction of the change they describe. Large
data is kept out of `rollouts`, whose rows are rewritten several times in a rollout's life.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from rollout_service.base.errors import StoreError
from rollout_service.store.sqlite.schema.migrations import ForRows, Migration, run_migration
from rollout_service.store.sqlite.schema.runs import (
    AFTER_ENVIRONMENTS,
    BEFORE_ENVIRONMENTS,
    ENVIRONMENTS,
    VERSION_2,
    VERSION_4,
    VERSION_5,
    VERSION_9,
)

Disk = Literal["local", "network"]
"""Whether a file is on a disk of this host, or on a file system that other hosts see too."""
APPLICATION_ID = 0x526F6C6C
"""The mark of this project's files: "Roll" in ASCII."""

_VERSION_1 = """
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    fingerprint BLOB NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    lease_until REAL NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0,
    cancel INTEGER NOT NULL DEFAULT 0,
    reward REAL,
    stop_reason TEXT,
    code TEXT,
    retries TEXT NOT NULL DEFAULT '[]',
    spans TEXT NOT NULL DEFAULT '[]',
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
CREATE INDEX ready ON rollouts (seq) WHERE state = 'queued' AND owner IS NULL;
CREATE INDEX leased ON rollouts (lease_until) WHERE owner IS NOT NULL;
CREATE INDEX by_state ON rollouts (state, seq);

CREATE TABLE requests (seq INTEGER PRIMARY KEY, request TEXT NOT NULL) STRICT;
CREATE TABLE results (seq INTEGER PRIMARY KEY, result TEXT NOT NULL, trajectory BLOB) STRICT;

CREATE TABLE tombstones (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE
) STRICT;
CREATE TRIGGER tombstones_capped AFTER INSERT ON tombstones BEGIN
    DELETE FROM tombstones WHERE number <= NEW.number - 100000;
END;

CREATE TABLE events (
    event_id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    data TEXT NOT NULL
) STRICT;
CREATE TRIGGER events_capped AFTER INSERT ON events WHEN NEW.event_id % 1000 = 0 BEGIN
    DELETE FROM events WHERE event_id <= NEW.event_id - 100000;
END;

CREATE TABLE counts (state TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO counts VALUES
    ('queued', 0), ('init', 0), ('rollout', 0), ('evaluate', 0),
    ('completed', 0), ('failed', 0), ('cancelled', 0);

CREATE TRIGGER terminal_is_final BEFORE UPDATE ON rollouts
WHEN OLD.state IN ('completed', 'failed', 'cancelled') BEGIN
    SELECT RAISE(ABORT, 'a terminal rollout never changes');
END;
CREATE TRIGGER submitted AFTER INSERT ON rollouts BEGIN
    UPDATE counts SET count = count + 1 WHERE state = NEW.state;
    INSERT INTO events (time, kind, subject, data) VALUES (
        NEW.changed_at, 'rollout.state', NEW.rollout_id,
        json_patch('{}', json_object(
            'state', NEW.state, 'attempt', NEW.attempt, 'stop_reason', NEW.stop_reason
        ))
    );
END;
CREATE TRIGGER moved AFTER UPDATE OF state ON rollouts WHEN NEW.state IS NOT OLD.state BEGIN
    UPDATE counts SET count = count - 1 WHERE state = OLD.state;
    UPDATE counts SET count = count + 1 WHERE state = NEW.state;
    INSERT INTO events (time, kind, subject, data) VALUES (
        NEW.changed_at, 'rollout.state', NEW.rollout_id,
        json_patch('{}', json_object(
            'state', NEW.state, 'attempt', NEW.attempt,
            'reward', NEW.reward, 'stop_reason', NEW.stop_reason, 'code', NEW.code
        ))
    );
END;
CREATE TRIGGER cancel_requested AFTER UPDATE OF cancel ON rollouts
WHEN NEW.cancel AND NOT OLD.cancel AND NEW.owner IS NOT NULL BEGIN
    INSERT INTO events (time, kind, subject, data) VALUES (
        NEW.changed_at, 'rollout.cancel_requested', NEW.rollout_id,
        json_object('state', NEW.state, 'attempt', NEW.attempt)
    );
END;
"""

_VERSION_3 = """
UPDATE rollouts SET attempt = attempt - 1 WHERE owner IS NOT NULL AND state = 'queued';
ALTER TABLE rollouts ADD COLUMN pool TEXT NOT NULL DEFAULT 'policy';
UPDATE rollouts SET pool = (SELECT json_extract(request, '$.pool') FROM requests WHERE requests.seq = rollouts.seq)
WHERE state NOT IN ('completed', 'failed', 'cancelled');
DROP INDEX ready;
CREATE INDEX ready ON rollouts (seq, pool, not_before) WHERE state = 'queued' AND owner IS NULL;
"""
"""An attempt counts once it enters its first stage; earlier releases counted the lease. Claims select by pool."""

_VERSION_6 = """
CREATE TABLE turns (
    rollout INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (rollout, number)
) STRICT;
CREATE TRIGGER ended_rollout_needs_no_turns AFTER UPDATE OF state ON rollouts
WHEN NEW.state IN ('completed', 'failed', 'cancelled') BEGIN
    DELETE FROM turns WHERE rollout = NEW.seq;
END;
"""
"""The turns of rollouts that have not ended, so that an interrupted rollout continues from its last turn."""

_VERSION_8 = """
CREATE TABLE steps (
    rollout INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (rollout, number)
) STRICT;
"""
"""The steps of attempts that have ended. The number -1 marks a rollout that was erased: no more is stored of it."""

MIGRATIONS: Sequence[Migration] = (
    _VERSION_1,
    VERSION_2,
    _VERSION_3,
    VERSION_4,
    VERSION_5,
    _VERSION_6,
    (BEFORE_ENVIRONMENTS, ForRows("rollouts", ENVIRONMENTS), AFTER_ENVIRONMENTS),
    _VERSION_8,
    VERSION_9,
)
"""What upgrades the schema; number n, from 1, upgrades version n - 1 to version n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSchema:
    """What a file of this project holds, and how it is written."""

    migrations: Sequence[Migration]
    application_id: int
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


STORE = DatabaseSchema(migrations=MIGRATIONS, application_id=APPLICATION_ID, has_events=True)
"""The store of rollouts and runs."""


def migrate(connection: sqlite3.Connection, schema: DatabaseSchema = STORE) -> None:
    """Upgrade a database to the current version, each step in one transaction.

    Raises:
        StoreError: The file belongs to another program or to a newer release of this one.
        sqlite3.Error: The file cannot be read or written.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != schema.application_id and tables:
        raise StoreError(
            "the store's file is a database of another program",
            hint="Use another state directory, or move that file away.",
        )
    if version > len(schema.migrations):
        raise StoreError(
            f"the store's file has schema version {version}, but this release supports only "
            f"{len(schema.migrations)}",
            hint="Run the newer release that wrote it, or use another state directory.",
        )
    for number, migration in enumerate(schema.migrations[version:], start=version + 1):
        done = f"PRAGMA application_id = {schema.application_id}; PRAGMA user_version = {number};"
        run_migration(connection, migration, done, version=number)
