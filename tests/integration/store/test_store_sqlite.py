"""The SQLite store protects its file, reports failures, commits writes in groups and keeps its limits."""

import dataclasses
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from api_schemas.rollouts import BranchPoint, RolloutState
from api_schemas.views.summaries import SummaryFilter
from rollout_service.base.errors import DefectError, StoreError
from rollout_service.settings import RetentionSettings
from rollout_service.store import jobs
from rollout_service.store.retrying import retry_until_stored
from rollout_service.store.sqlite import SqliteStore, erasure_statements, thread
from rollout_service.store.sqlite.connection import Database
from rollout_service.store.sqlite.schema import STORE, prepare
from tests.support.store.rollouts import order
from tests.support.waiting import until

EVERYTHING = RetentionSettings(ended_run_seconds=0, settled_group_seconds=0, rollout_seconds=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.sqlite3"


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def spoil(path: Path) -> None:
    """Overwrite all but the header and the first page of the schema."""
    content = path.read_bytes()
    write(path, content[:8192].ljust(len(content), b"Z"))


async def submit_many(store: SqliteStore, numbers: range) -> None:
    async with anyio.create_task_group() as group:
        for number in numbers:
            group.start_soon(store.submit, order(f"r{number}"))


async def test_everything_is_still_there_after_a_restart(path):
    async with await SqliteStore.open(path) as store:
        await submit_many(store, range(5))
        await store.cancel("r3")
        newest = await store.last_event()
    async with await SqliteStore.open(path) as store:
        assert await store.counts() == {RolloutState.QUEUED: 4, RolloutState.CANCELLED: 1}
        assert await store.wait_for_events(after=newest - 1) == newest
        with anyio.fail_after(5):
            await store.wait_for_work()


def logs_of(path: Path) -> set[str]:
    return {file.name.removeprefix(path.name) for file in path.parent.iterdir()} - {"", ".lock"}


async def test_on_a_network_disk_nothing_is_shared_in_memory_and_a_file_of_a_local_disk_is_taken_over(path):
    async with await SqliteStore.open(path) as store:
        await submit_many(store, range(5))
        assert logs_of(path) == {"-wal", "-shm"}
    for _ in range(2):
        async with await SqliteStore.open(path, disk="network") as store:
            await submit_many(store, range(8))
            assert logs_of(path) == {"-journal"}
            assert await store.counts() == {RolloutState.QUEUED: 8}
    async with await SqliteStore.open(path) as store:
        assert await store.counts() == {RolloutState.QUEUED: 8}


async def test_writes_that_wait_share_a_commit(path):
    statements: list[str] = []
    async with await SqliteStore.open(path) as store:
        await store._thread.read(lambda db: db.set_trace_callback(statements.append))
        await submit_many(store, range(200))
        assert 1 <= statements.count("COMMIT") <= 20


async def test_the_event_loop_runs_while_the_disk_is_waited_for(path):
    async with await SqliteStore.open(path) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with anyio.create_task_group() as group:
                group.start_soon(store.submit, order("r0"))
                await anyio.sleep(0.1)
                other.execute("ROLLBACK")
        assert await store.counts() == {RolloutState.QUEUED: 1}


@pytest.mark.parametrize("version", [0, 2])
async def test_a_file_with_another_schema_is_refused_and_left_alone(path, version):
    async with await SqliteStore.open(path):
        pass
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    for _ in range(2):
        with pytest.raises(StoreError, match=f"schema version {version}") as caught:
            await SqliteStore.open(path)
        assert "release that wrote it" in caught.value.hint


async def test_a_file_of_an_earlier_release_gets_the_tables_that_it_lacks(path):
    async with await SqliteStore.open(path) as store:
        await submit_many(store, range(1))
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE branches; DROP INDEX ended_of_no_run; DROP INDEX settled_with_rollouts;")
    point = BranchPoint(rollout_id="r0", turn=1)
    async with await SqliteStore.open(path) as store:
        await store.submit(order("r1").model_copy(update={"branch_of": point}))
        rows = (await store.summaries(SummaryFilter())).rows
        assert [row.branch_of for row in rows] == [point, None]
        assert await store.runs.delete_expired(EVERYTHING) == 0


async def test_a_file_whose_creation_is_interrupted_is_created_at_the_next_start(path):
    path.parent.mkdir()
    broken = dataclasses.replace(STORE, tables=STORE.tables + "CREATE TABLE rollouts (x);")
    with pytest.raises(StoreError, match="already exists"):
        Database(path, broken)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    async with await SqliteStore.open(path) as store:
        await submit_many(store, range(1))


def test_retention_looks_at_nothing_that_has_not_expired():
    db, steps = sqlite3.connect(":memory:"), list[int]()
    db.row_factory = sqlite3.Row
    prepare(db)
    db.execute("INSERT INTO runs VALUES (1, 'a', x'', '{}', 'running', 0, 0, 0, 0, '', 0, 0, '{}', '', 9, 9)")
    names = "rollout_id, fingerprint, pool, environment, run, state, created_at, queued_at, changed_at"
    of_group = "run, number, epoch, state, members, opened_at, changed_at"
    for number in range(5_000):
        db.execute(f"INSERT INTO rollouts ({names}) VALUES (?, x'', '', '', 1, 'completed', 0, 0, 0)", (f"r{number}",))
        db.execute(f"INSERT INTO groups ({of_group}) VALUES (1, ?, 0, 'dropped', '', 0, 9)", (number,))
    db.set_progress_handler(lambda: steps.append(1), 1_000)
    assert erasure_statements.delete_expired(db, 5.0, EVERYTHING) == 0
    assert len(steps) < 5


@pytest.mark.parametrize("waits", [None, {"calc": 0.0}])
async def test_a_damaged_record_fails_its_rollout_and_no_other(path, waits):
    async with await SqliteStore.open(path) as store:
        for number in (1, 2):
            await store.submit(order(f"r{number}"))
        await store._thread.write(lambda db: db.execute("UPDATE requests SET request = '{' WHERE seq = 1"))
        assert await store.claim("here", limit=1, lease_seconds=10, waits=waits) == []
        await store.wait_for_work()
        (lease,) = await store.claim("here", limit=1, lease_seconds=10, waits=waits)
        assert lease.rollout_id == "r2"
        assert await store.counts() == {RolloutState.QUEUED: 1, RolloutState.FAILED: 1}
        newest = (await store.events(after=0))[-1]
        assert (newest.subject, newest.data["state"], newest.data["code"]) == ("r1", "failed", "record_lost")


async def test_a_database_of_another_program_is_refused(path):
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program"):
        await SqliteStore.open(path)


async def test_a_file_that_is_not_a_database_is_refused_with_a_hint(path):
    write(path, b"not a database, but long enough to have a header" * 100)
    with pytest.raises(StoreError, match="not a database") as caught:
        await SqliteStore.open(path)
    assert "restore a backup" in caught.value.hint


async def test_a_path_that_cannot_be_created_is_refused_with_a_hint(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be opened") as caught:
        await SqliteStore.open(tmp_path / "file" / "store.sqlite3")
    assert "writable" in caught.value.hint


async def test_damage_is_reported_with_a_hint(path):
    async with await SqliteStore.open(path) as store:
        await submit_many(store, range(300))
    spoil(path)
    with pytest.raises(StoreError, match="malformed") as caught:
        async with await SqliteStore.open(path) as store:
            await store.list(limit=300)
    assert "damaged" in caught.value.hint


async def test_a_wrong_statement_is_a_defect_and_is_not_tried_again(path):
    async with await SqliteStore.open(path) as store:
        wrong = partial(store._thread.read, lambda db: db.execute("SELECT name FROM nowhere"))
        with anyio.fail_after(10), pytest.raises(DefectError, match="no such table: nowhere") as caught:
            await retry_until_stored("read", wrong)
        assert isinstance(caught.value.__cause__, sqlite3.Error)
        assert store.problem is None


async def test_a_full_disk_fails_one_write_and_later_writes_succeed(path):
    async with await SqliteStore.open(path) as store:
        await store.submit(order("r0"))
        pages = await store._thread.read(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
        await store._thread.read(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone()[0])
        with capture_logs() as log:
            for _ in range(2):
                with pytest.raises(StoreError, match="full") as caught:
                    await store.submit(order("r1", padding="x" * 100_000))
        assert "free space" in caught.value.hint
        assert store.errors == 2
        assert [(line["log_level"], line["event"]) for line in log] == [("error", "the store fails")]
        assert await store.get("r1") is None
        await store._thread.read(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone()[0])
        await store.submit(order("r1", padding="x" * 100_000))
        assert await store.counts() == {RolloutState.QUEUED: 2}
        assert store.size_bytes() > 100_000
        with anyio.fail_after(30), capture_logs() as log:
            while not log:
                await store.counts()
                await anyio.sleep(0.1)
        assert [line["event"] for line in log] == ["the store works again"]
        assert store.problem is None


def delete(path: Path) -> None:
    shutil.copytree(path.parent, path.parent.with_name("kept"))
    shutil.rmtree(path.parent)


def move(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def replace(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.touch()


def delete_the_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


@pytest.mark.parametrize("lose", [delete, move, replace, delete_the_log])
async def test_a_file_that_was_lost_takes_no_write(path, lose):
    async with await SqliteStore.open(path) as store:
        await store.submit(order("r0"))
        await store.submit(order("r1"))
        lose(path)
        with capture_logs() as logs:
            for number in range(2, 5):
                with pytest.raises(StoreError, match="while it is open") as caught:
                    await store.submit(order(f"r{number}"))
        assert "no restart is needed" in caught.value.hint
        assert store.problem is not None
        assert await store.counts() == {RolloutState.QUEUED: 2}, "it can still be read"
        assert [line["event"] for line in logs] == ["the store fails"]


async def test_work_goes_on_once_a_lost_file_is_back(path, monkeypatch):
    monkeypatch.setattr(thread, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(jobs, "PROBLEM_SECONDS", 0.0)
    async with await SqliteStore.open(path) as store:
        await store.submit(order("r0"))
        move(path)
        await until(lambda: store.problem is not None, 20)
        await anyio.Path(path.parent.with_name("moved")).rename(path.parent)
        await until(lambda: store.problem is None, 20)
        await store.submit(order("r1"))
    async with await SqliteStore.open(path) as store:
        assert await store.counts() == {RolloutState.QUEUED: 2}


async def test_work_that_a_failed_claim_did_not_get_wakes_the_next_one(path):
    async with await SqliteStore.open(path) as store:
        await store.submit(order("r0"))
        move(path)
        with pytest.raises(StoreError):
            await store.claim("a", limit=1, lease_seconds=1_000)
        path.parent.with_name("moved").rename(path.parent)
        with anyio.fail_after(5):
            await store.wait_for_work()
        assert len(await store.claim("a", limit=1, lease_seconds=1_000)) == 1


async def test_a_reader_that_holds_the_file_is_waited_for_and_a_writer_is_named(path):
    async with await SqliteStore.open(path) as store:
        await store._thread.read(lambda db: db.execute("PRAGMA busy_timeout = 50").fetchone())
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM rollouts").fetchone()
            await store.submit(order("r0"))
            other.execute("COMMIT")
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked") as caught:
                await store.submit(order("r1"))
            assert "close it" in caught.value.hint
            assert caught.value.retryable
            other.execute("ROLLBACK")
        await store.submit(order("r1"))
        assert await store.counts() == {RolloutState.QUEUED: 2}


async def test_old_events_and_tombstones_are_dropped(path):
    fill_events = """
        INSERT INTO events (time, kind, subject, data)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 102500)
        SELECT 0, 'test', '', '{}' FROM n
    """
    async with await SqliteStore.open(path) as store:
        await store._thread.write(lambda db: db.execute(fill_events).rowcount)
        events = await store.events(after=0, limit=200_000)
        assert events[0].event_id == 2_001
        assert events[-1].event_id == await store.last_event() == 102_500
        await store.cancel("first")
        await store._thread.write(lambda db: db.execute("INSERT INTO tombstones VALUES (100001, 'newest')").rowcount)
        rows = await store._thread.read(lambda db: db.execute("SELECT rollout_id FROM tombstones").fetchall())
        assert [tuple(row) for row in rows] == [("newest",)]


async def test_the_database_itself_refuses_to_change_a_terminal_rollout(path):
    async with await SqliteStore.open(path) as store:
        await store.submit(order("r0"))
        await store.cancel("r0")
        with pytest.raises(DefectError, match="never changes"):
            await store._thread.write(lambda db: db.execute("UPDATE rollouts SET state = 'queued'").rowcount)
        assert await store.counts() == {RolloutState.CANCELLED: 1}


async def test_a_job_that_fails_half_way_leaves_nothing(path):
    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO tombstones (rollout_id) VALUES ('half')")
        raise LookupError("on the way")

    async with await SqliteStore.open(path) as store:
        with pytest.raises(LookupError, match="on the way"):
            await store._thread.write(half)
        rows = await store._thread.read(lambda db: db.execute("SELECT * FROM tombstones").fetchall())
        assert rows == []
