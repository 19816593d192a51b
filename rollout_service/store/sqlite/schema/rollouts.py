"""The tables of rollouts and of events.

A trigger rejects every change of a terminal rollout, and triggers write the events and the counts in the transaction of
the change they describe. Large data is kept out of `rollouts`, whose rows are rewritten several times in a rollout's
life.
"""

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

CREATE TRIGGER terminal_is_final BEFORE UPDATE ON rollouts
WHEN OLD.state IN ('completed', 'failed', 'cancelled') BEGIN
    SELECT RAISE(ABORT, 'a terminal rollout never changes');
END;
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
