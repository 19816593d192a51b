"""An upgrade of a large store may be killed, takes little memory, and says how far it is."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from api_schemas.views.summaries import SummaryFilter
from rollout_service.base.errors import StoreError
from rollout_service.store.sqlite import SqliteStore
from rollout_service.store.sqlite.connection import Database
from rollout_service.store.sqlite.schema import MIGRATIONS, STORE, migrations

ROWS = 40_000
IN_ENVIRONMENT = SummaryFilter(environment="env-1")
VERSION_6 = replace(STORE, migrations=MIGRATIONS[:6])
FILL = """
WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?)
INSERT INTO rollouts (rollout_id, fingerprint, state, created_at, queued_at, changed_at)
SELECT printf('r%0100d', n), x'00', iif(n % 2, 'completed', 'queued'), n, n, n FROM number
"""
REQUESTS = """
INSERT INTO requests SELECT seq, iif(seq % 10, '{"task":{"environment":"env-' || (seq % 3) || '"}}', 'torn')
FROM rollouts
"""
KILLED = """
import os, signal, sys
from rollout_service.store.sqlite.connection import Database
from rollout_service.store.sqlite.schema import migrations

class Progress(migrations._Progress):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "rows" and value >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

migrations._Progress = Progress
Database(sys.argv[1])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a store of version 6."""
    file = tmp_path / "rollouts.sqlite3"
    with closing(Database(file, VERSION_6)) as database:
        database.connection.execute("BEGIN")
        database.connection.execute(FILL, (ROWS,))
        database.connection.execute(REQUESTS)
        database.connection.execute("COMMIT")
    return file


def columns(file: Path) -> set[str]:
    with closing(sqlite3.connect(file)) as db:
        return {row[1] for row in db.execute("PRAGMA table_info(rollouts)")}


def environments(file: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(file)) as db:
        return db.execute("SELECT environment, count(*) FROM rollouts GROUP BY 1 ORDER BY 1").fetchall()


def test_an_upgrade_that_is_killed_begins_again(file: Path) -> None:
    for rows in (ROWS // 2, ROWS):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(file), str(rows)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert file.with_name("rollouts.sqlite3-wal").stat().st_size > 0, "it had begun to write"
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (6,)
        assert "environment" not in columns(file)
    Database(file).close()
    expected = {"": ROWS // 10}
    for seq in range(1, ROWS + 1):
        if seq % 10:
            name = f"env-{seq % 3}"
            expected[name] = expected.get(name, 0) + 1
    assert environments(file) == sorted(expected.items())
    with closing(sqlite3.connect(file)) as db, pytest.raises(sqlite3.IntegrityError, match="never changes"):
        db.execute("UPDATE rollouts SET attempt = 9 WHERE seq = 1")  # the trigger is there again


def test_an_upgrade_that_fails_changes_nothing(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute(
            "CREATE INDEX by_code ON rollouts (attempt)"
        )  # the name is taken at the upgrade's very end
    with pytest.raises(StoreError, match="by_code"):
        Database(file)
    assert "environment" not in columns(file)
    with closing(sqlite3.connect(file)) as db:
        db.execute("DROP INDEX by_code")
    Database(file).close()
    assert len(environments(file)) == 4


def test_a_long_upgrade_says_how_far_it_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "PROGRESS_SECONDS", 0.0)
    with capture_logs() as lines:
        Database(file).close()
    told = [line for line in lines if line["schema_version"] == 7]
    rows = [line["rows"] for line in told if line["event"] == "upgrading the store" and line["of"] == ROWS]
    assert rows == sorted(rows)
    assert 0 < rows[0] < ROWS
    assert rows[-1] == ROWS
    assert told[-1]["event"] == "upgraded the store"


def test_a_short_upgrade_says_nothing(tmp_path: Path) -> None:
    with capture_logs() as lines:
        Database(tmp_path / "rollouts.sqlite3").close()
    assert lines == []


@pytest.mark.anyio
async def test_an_upgraded_store_is_used_as_any_other(file: Path) -> None:
    async with await SqliteStore.open(file) as store:
        assert [row.environment for row in (await store.summaries(IN_ENVIRONMENT, limit=2)).rows] == [
            "env-1"
        ] * 2
