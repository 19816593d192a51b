"""The tables of runs, their groups and their batches.

An acknowledged group or batch never changes, and a dropped group never comes back. Triggers write the counts and events
in the transaction of the change they describe. Groups refer to their rollouts by id; the outcome of a rollout is stored
only in the tables of rollouts.
"""

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
