"""The schema of the store's files.

The database itself enforces the invariants, by constraints and triggers, so no code path can break them. Triggers write
the counts and events in the transaction of the change they describe.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace
from typing import Literal, Self

from rollout_service.base.errors import StoreError

# An acknowledged group or batch never changes, and a dropped group never comes back. Groups refer to their rollouts by
# id; the outcome of a rollout is stored only in the tables of rollouts.

RUNS = """
CREATE TABLE runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL UNIQUE,
    fingerprint BLOB NOT NULL,
    request TEXT NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    first_version INTEGER NOT NULL,
    tasks INTEGER NOT NULL,
    total INTEGER,
    digest TEXT,
    cursor INTEGER NOT NULL DEFAULT 0,
    batches INTEGER NOT NULL DEFAULT 0,
    reported TEXT NOT NULL DEFAULT '{}',
    problem TEXT,
    created_at REAL NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
CREATE TRIGGER run_created AFTER INSERT ON runs BEGIN
    INSERT INTO events (time, kind, subject, data)
    VALUES (NEW.changed_at, 'run.state', NEW.run_id, json_object('state', NEW.state));
END;
CREATE TRIGGER run_moved AFTER UPDATE OF state ON runs WHEN NEW.state IS NOT OLD.state BEGIN
    INSERT INTO events (time, kind, subject, data)
    VALUES (NEW.changed_at, 'run.state', NEW.run_id, json_object('state', NEW.state));
END;
CREATE TRIGGER run_is_over BEFORE UPDATE OF state ON runs
WHEN OLD.state IN ('ended', 'finished') AND NEW.state IS NOT OLD.state BEGIN
    SELECT RAISE(ABORT, 'a run that is over never changes its state');
END;

CREATE TABLE run_tasks (
    run INTEGER NOT NULL, number INTEGER NOT NULL, task TEXT NOT NULL, PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;

-- `pruned` is 1 once the group's tokens are deleted, and 2 once its rollouts are.
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL,
    number INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'open',
    reason TEXT,
    members TEXT NOT NULL,
    cut TEXT NOT NULL DEFAULT '[]',
    samples TEXT,
    summary TEXT,
    oldest_version INTEGER,
    batch INTEGER,
    pruned INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    opened_at REAL NOT NULL,
    changed_at REAL NOT NULL,
    UNIQUE (run, number)
) STRICT;
CREATE INDEX groups_open ON groups (run, number) WHERE state = 'open';
CREATE INDEX groups_ready ON groups (run, number) WHERE state = 'ready';
CREATE INDEX groups_batched ON groups (batch) WHERE batch IS NOT NULL;
CREATE INDEX groups_settled ON groups (run, changed_at)
    WHERE state IN ('acknowledged', 'dropped') AND NOT pruned;
CREATE INDEX groups_by_state ON groups (run, state, number, reason);

CREATE TABLE tallies (
    run INTEGER NOT NULL, name TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (run, name)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER group_is_settled BEFORE UPDATE OF state ON groups
WHEN OLD.state IN ('acknowledged', 'dropped') BEGIN
    SELECT RAISE(ABORT, 'a group that was acknowledged or dropped never changes');
END;
CREATE TRIGGER group_opened AFTER INSERT ON groups BEGIN
    INSERT INTO tallies VALUES (NEW.run, NEW.state, 1) ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER group_moved AFTER UPDATE OF state ON groups WHEN NEW.state IS NOT OLD.state BEGIN
    UPDATE tallies SET count = count - 1 WHERE run = NEW.run AND name = OLD.state;
    INSERT INTO tallies
    VALUES (NEW.run, iif(NEW.state = 'dropped', 'dropped:' || NEW.reason, NEW.state), 1)
    ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER group_closed AFTER UPDATE OF state ON groups
WHEN NEW.state IN ('ready', 'dropped') AND OLD.state = 'open' BEGIN
    INSERT INTO events (time, kind, subject, data) VALUES (
        NEW.changed_at, 'group.closed',
        (SELECT run_id FROM runs WHERE seq = NEW.run) || '.' || NEW.number,
        json_patch('{}', json_object(
            'run', (SELECT run_id FROM runs WHERE seq = NEW.run), 'state', NEW.state, 'reason', NEW.reason
        ))
    );
END;

-- The head of a group, ready to be sent, from when the group is kept until it is settled.
CREATE TABLE group_heads (
    seq INTEGER PRIMARY KEY, form BLOB NOT NULL, tokens TEXT NOT NULL, json BLOB NOT NULL
) STRICT;
CREATE TRIGGER group_revised AFTER UPDATE OF samples ON groups BEGIN
    DELETE FROM group_heads WHERE seq = NEW.seq;
END;
CREATE TRIGGER group_needs_no_head AFTER UPDATE OF state ON groups
WHEN NEW.state IN ('acknowledged', 'dropped') BEGIN
    DELETE FROM group_heads WHERE seq = NEW.seq;
END;

CREATE TABLE group_history (
    run INTEGER NOT NULL, part INTEGER NOT NULL, records BLOB NOT NULL, PRIMARY KEY (run, part)
) STRICT;

CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL,
    number INTEGER NOT NULL,
    state TEXT NOT NULL,
    lease_key TEXT,
    lease_until REAL NOT NULL,
    deliveries INTEGER NOT NULL,
    version INTEGER NOT NULL,
    dropped TEXT NOT NULL,
    changed_at REAL NOT NULL,
    UNIQUE (run, number)
) STRICT;
CREATE INDEX batches_out ON batches (run, number) WHERE state IN ('leased', 'returned');
CREATE TRIGGER batch_is_settled BEFORE UPDATE ON batches
WHEN OLD.state IN ('acknowledged', 'dissolved') BEGIN
    SELECT RAISE(ABORT, 'a batch that was acknowledged or dissolved never changes');
END;
CREATE TRIGGER batch_made AFTER INSERT ON batches BEGIN
    INSERT INTO events (time, kind, subject, data) VALUES (
        NEW.changed_at, 'batch.' || NEW.state,
        (SELECT run_id FROM runs WHERE seq = NEW.run) || '.b' || NEW.number,
        json_object('run', (SELECT run_id FROM runs WHERE seq = NEW.run), 'delivery', NEW.deliveries)
    );
END;
CREATE TRIGGER batch_moved AFTER UPDATE OF state, deliveries ON batches BEGIN
    INSERT INTO events (time, kind, subject, data) VALUES (
        NEW.changed_at, 'batch.' || NEW.state,
        (SELECT run_id FROM runs WHERE seq = NEW.run) || '.b' || NEW.number,
        json_object('run', (SELECT run_id FROM runs WHERE seq = NEW.run), 'delivery', NEW.deliveries)
    );
END;
"""


# A trigger rejects every change of a terminal rollout. Large data is kept out of `rollouts`, whose rows are rewritten
# several times in a rollout's life.

EVENTS = """
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
"""

ROLLOUTS = """
-- `attempt` counts those that have entered their first stage. A rollout of a run names its group, so that it is found
-- without parsing ids: a group lists only the latest rollout of each sample. Lists show `turns`, `tokens` and `worked`.
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    fingerprint BLOB NOT NULL,
    pool TEXT NOT NULL,
    environment TEXT NOT NULL,
    run INTEGER,
    group_number INTEGER,
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
    turns INTEGER,
    tokens INTEGER,
    worked REAL,
    retries TEXT NOT NULL DEFAULT '[]',
    spans TEXT NOT NULL DEFAULT '[]',
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
CREATE INDEX ready ON rollouts (seq, pool, not_before) WHERE state = 'queued' AND owner IS NULL;
CREATE INDEX leased ON rollouts (lease_until) WHERE owner IS NOT NULL;
CREATE INDEX rollouts_of_group ON rollouts (run, group_number) WHERE run IS NOT NULL;

-- What lists search by. An index on one column is in the order of the rows' numbers, too.
CREATE INDEX by_state ON rollouts (state, seq);
CREATE INDEX by_environment ON rollouts (environment);
CREATE INDEX by_run ON rollouts (run) WHERE run IS NOT NULL;
CREATE INDEX by_code ON rollouts (code) WHERE code IS NOT NULL;

CREATE TABLE requests (seq INTEGER PRIMARY KEY, request TEXT NOT NULL) STRICT;
CREATE TABLE results (
    seq INTEGER PRIMARY KEY,
    result TEXT NOT NULL,
    trajectory BLOB,
    oldest_version INTEGER,
    newest_version INTEGER
) STRICT;

-- The turns of rollouts that have not ended, so that an interrupted rollout continues from its last turn.
CREATE TABLE turns (
    rollout INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (rollout, number)
) STRICT;
-- The steps of attempts that have ended. The number -1 marks a rollout that was erased: no more is stored of it.
CREATE TABLE steps (
    rollout INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (rollout, number)
) STRICT;

-- Rollouts that were cancelled before they were submitted.
CREATE TABLE tombstones (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE
) STRICT;
CREATE TRIGGER tombstones_capped AFTER INSERT ON tombstones BEGIN
    DELETE FROM tombstones WHERE number <= NEW.number - 100000;
END;

CREATE TABLE counts (state TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO counts VALUES
    ('queued', 0), ('init', 0), ('rollout', 0), ('evaluate', 0),
    ('completed', 0), ('failed', 0), ('cancelled', 0);

CREATE TRIGGER ended_rollout_needs_no_turns AFTER UPDATE OF state ON rollouts
WHEN NEW.state IN ('completed', 'failed', 'cancelled') BEGIN
    DELETE FROM turns WHERE rollout = NEW.seq;
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

ADDED = """
-- Where in an earlier rollout a branch begins, for lists.
CREATE TABLE IF NOT EXISTS branches (seq INTEGER PRIMARY KEY, branch_of TEXT NOT NULL) STRICT;
-- What retention looks for.
CREATE INDEX IF NOT EXISTS ended_of_no_run ON rollouts (changed_at)
    WHERE run IS NULL AND state IN ('completed', 'failed', 'cancelled');
CREATE INDEX IF NOT EXISTS settled_with_rollouts ON groups (changed_at)
    WHERE state IN ('acknowledged', 'dropped') AND pruned < 2;
-- Only an erasure changes a rollout that has ended: it deletes the reward.
DROP TRIGGER IF EXISTS terminal_is_final;
CREATE TRIGGER IF NOT EXISTS ended_is_final
BEFORE UPDATE OF state, attempt, token, owner, cancel, stop_reason, code, changed_at ON rollouts
WHEN OLD.state IN ('completed', 'failed', 'cancelled') BEGIN
    SELECT RAISE(ABORT, 'a terminal rollout never changes');
END;
"""


Disk = Literal["local", "network"]
"""A disk of this host, or a file system that other hosts see too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSchema:
    tables: str
    """The script that creates the tables, indexes and triggers of a new file."""
    application_id: int
    added: str = ""
    """The script for what a later release added, so files of the same version may lack it. Earlier releases ignore
    it."""
    version: int = 1
    has_events: bool = False
    """Each commit reports the newest id of the table `events`."""
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """`FULL` keeps each commit through a loss of power, `NORMAL` through the end of the process alone."""
    page_size: int = 4096
    secure_delete: bool = False
    journal_mode: Literal["WAL", "TRUNCATE"] = "WAL"
    """`WAL` needs an index in memory that all openers share, which a file system of several hosts cannot give them."""

    def on_disk(self, disk: Disk) -> Self:
        return replace(self, journal_mode="WAL" if disk == "local" else "TRUNCATE")


STORE = DatabaseSchema(tables=EVENTS + ROLLOUTS + RUNS, added=ADDED, application_id=0x526F6C6C, has_events=True)
"""Its mark is "Roll" in ASCII."""


def prepare(connection: sqlite3.Connection, schema: DatabaseSchema = STORE) -> None:
    """Create the tables of a new database, in one transaction; check any other, and complete it.

    Raises:
        StoreError: The file belongs to another program or to a release with another schema.
        sqlite3.Error: The file cannot be read or written.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not tables:
        marks = f"PRAGMA application_id = {schema.application_id}; PRAGMA user_version = {schema.version};"
        connection.executescript(f"BEGIN IMMEDIATE; {schema.tables} {schema.added} {marks} COMMIT;")
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
    else:
        connection.executescript(schema.added)
