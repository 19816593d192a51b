"""The schema of the store of live sessions.

The texts of users and the model are in overflow pages of `contents` alone: a row begins with padding that fills
whatever SQLite keeps of it in the page of its tree. SQLite moves rows between the pages of a tree and may leave a copy
behind, even with `secure_delete`; it never moves overflow pages, and overwrites each with zeros when its row is
deleted. The other tables have ids, hashes, numbers and times.
"""

from __future__ import annotations

from rollout_service.store.sqlite.schema import DatabaseSchema

PAGE_SIZE = 1_024
"""Small pages keep the padding small."""

_TABLES = """
-- `client` is the hash of a client's own id, and empty for a session that was opened over the API.
CREATE TABLE sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL UNIQUE,
    key_hash BLOB NOT NULL,
    pool TEXT NOT NULL,
    user TEXT NOT NULL,
    tenant TEXT NOT NULL,
    train INTEGER NOT NULL,
    explicit INTEGER NOT NULL,
    client TEXT NOT NULL,
    quarantined INTEGER NOT NULL,
    retention_seconds REAL NOT NULL,
    continues TEXT,
    "group" TEXT,
    opened_at REAL NOT NULL,
    used_at REAL NOT NULL,
    closed_at REAL,
    closed_because TEXT,
    served INTEGER NOT NULL DEFAULT 0,
    opted_out INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    looked_at REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX sessions_by_key ON sessions (key_hash) WHERE key_hash != x'';
CREATE INDEX sessions_by_client ON sessions (client, seq) WHERE client != '';
CREATE INDEX sessions_by_age ON sessions (opened_at, session_id);
CREATE INDEX sessions_by_user ON sessions (user);
CREATE INDEX sessions_by_group ON sessions ("group") WHERE "group" IS NOT NULL;
CREATE INDEX open_sessions ON sessions (used_at) WHERE closed_at IS NULL;
CREATE INDEX closed_sessions ON sessions (closed_at) WHERE closed_at IS NOT NULL;

CREATE TABLE turns (
    session INTEGER NOT NULL REFERENCES sessions (seq),
    turn INTEGER NOT NULL,
    kind TEXT NOT NULL,
    version INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    malformed INTEGER NOT NULL,
    recorded_at REAL NOT NULL,
    delivered INTEGER NOT NULL,
    mask TEXT,
    followed_at REAL,
    value REAL,
    reason TEXT,
    marked_at REAL,
    part INTEGER,
    dropped TEXT,
    PRIMARY KEY (session, turn)
) STRICT, WITHOUT ROWID;
CREATE INDEX undecided_turns ON turns (session) WHERE part IS NULL AND dropped IS NULL;
CREATE INDEX turns_to_judge ON turns (followed_at) WHERE kind = 'main' AND delivered AND followed_at IS NOT NULL
    AND mask IS NULL AND reason IS NULL AND part IS NULL AND dropped IS NULL;
CREATE TRIGGER a_turn_is_in_one_part BEFORE UPDATE OF part, dropped ON turns
WHEN OLD.part IS NOT NULL AND NEW.part IS NOT NULL AND NEW.part != OLD.part BEGIN
    SELECT raise(ABORT, 'the turn is in another part');
END;

CREATE TABLE contents (
    id INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    what TEXT NOT NULL,
    padding BLOB NOT NULL,
    data BLOB NOT NULL,
    body BLOB
) STRICT;
CREATE INDEX contents_by_turn ON contents (session, turn, what);

CREATE TABLE parts (
    seq INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions (seq),
    part INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    usable TEXT NOT NULL,
    "offset" INTEGER,
    rollout_id TEXT,
    closed_at REAL NOT NULL,
    UNIQUE (session, part)
) STRICT;
CREATE INDEX parts_by_run ON parts (run_id);
CREATE TRIGGER a_part_is_in_one_rollout BEFORE UPDATE OF rollout_id ON parts
WHEN OLD.rollout_id IS NOT NULL AND NEW.rollout_id IS NOT OLD.rollout_id BEGIN
    SELECT raise(ABORT, 'the part is in another rollout');
END;

CREATE TABLE version_values (
    pool TEXT NOT NULL,
    version INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    total REAL NOT NULL,
    satisfied INTEGER NOT NULL,
    PRIMARY KEY (pool, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE totals (name TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER a_turn_is_recorded AFTER INSERT ON turns BEGIN
    INSERT INTO totals VALUES ('served', 1), ('recorded', 1), ('waiting', 1)
    ON CONFLICT (name) DO UPDATE SET count = count + excluded.count;
END;
CREATE TRIGGER a_turn_is_decided AFTER UPDATE OF part, dropped ON turns
WHEN OLD.part IS NOT NEW.part OR OLD.dropped IS NOT NEW.dropped BEGIN
    INSERT INTO totals VALUES (
        CASE WHEN OLD.dropped IS NOT NULL THEN 'dropped:' || OLD.dropped
            WHEN OLD.part IS NULL THEN 'waiting' ELSE 'delivered' END, -1
    ), (
        CASE WHEN NEW.dropped IS NOT NULL THEN 'dropped:' || NEW.dropped
            WHEN NEW.part IS NULL THEN 'waiting' ELSE 'delivered' END, 1
    ) ON CONFLICT (name) DO UPDATE SET count = count + excluded.count;
END;
CREATE TRIGGER a_turn_is_judged AFTER UPDATE OF value ON turns
WHEN (OLD.value IS NULL) != (NEW.value IS NULL) BEGIN
    INSERT INTO totals VALUES ('judged', iif(NEW.value IS NULL, -1, 1))
    ON CONFLICT (name) DO UPDATE SET count = count + excluded.count;
END;
CREATE TRIGGER a_turn_is_opted_out AFTER UPDATE OF opted_out ON sessions WHEN NEW.opted_out != OLD.opted_out BEGIN
    INSERT INTO totals VALUES
        ('served', NEW.opted_out - OLD.opted_out), ('dropped:opted_out', NEW.opted_out - OLD.opted_out)
    ON CONFLICT (name) DO UPDATE SET count = count + excluded.count;
END;
CREATE TABLE earlier_sessions (user TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT, WITHOUT ROWID;

-- What was not to be stored of a conversation, which outlives its sessions.
CREATE TABLE opt_outs (
    conversation TEXT PRIMARY KEY, digests BLOB NOT NULL, is_complete INTEGER NOT NULL, used_at REAL NOT NULL
) STRICT;
CREATE INDEX opt_outs_by_use ON opt_outs (used_at);
"""

LIVE = DatabaseSchema(
    tables=_TABLES,
    application_id=0x526F6C4C,
    synchronous="NORMAL",
    page_size=PAGE_SIZE,
    secure_delete=True,
)
"""The mark is "RolL" in ASCII."""
