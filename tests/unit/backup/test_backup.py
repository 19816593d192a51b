"""A backup is of one moment and complete, and is restored only as it was made, and only where nothing is."""

import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_service.backup import Places, make_backup, restore, restore_backup
from rollout_service.backup.creation import pinned
from rollout_service.backup.manifest import MANIFEST, ONLY, REDIS_DUMP, STATES, Manifest, copy, describe_all
from rollout_service.base import private_files
from rollout_service.base.errors import ConfigurationError, ServiceError, StoreError
from rollout_service.base.private_files import open_state_folder
from rollout_service.cli import app
from rollout_service.live.register import UserHashes
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings import Settings, StoreSettings
from rollout_service.store.runs_contract import NoBatch
from rollout_service.store.sqlite import SqliteStore
from rollout_service.store.sqlite.schema import Disk
from tests.support.runs import create_run, lease_batch, leased_batch, make_ready


async def fill(state: Path, disk: Disk = "local") -> None:
    """Make the state folder of a service that has a queued rollout, and whose users have a salt."""
    async with await SqliteStore.open(state / private_files.STORE, disk=disk) as store:
        await store.submit(RolloutRequest(rollout_id="r", task=Task(environment="calc")))
    async with SqliteLiveStore(state / private_files.LIVE_STORE, disk):
        pass
    UserHashes.load(state / private_files.USERS_SALT)


@pytest.fixture
async def backup(tmp_path: Path) -> Path:
    await fill(tmp_path / "state")
    make_backup(Places({ONLY: tmp_path / "state"}), tmp_path / "backup")
    return tmp_path / "backup"


async def test_a_restored_state_is_the_one_that_was_backed_up(backup, tmp_path):
    manifest = restore_backup(backup, Places({ONLY: tmp_path / "new"}))
    assert manifest.counts == {"rollouts": 1, "runs": 0, "sessions": 0}
    async with await SqliteStore.open(tmp_path / "new" / private_files.STORE) as store:
        assert await store.counts() == {RolloutState.QUEUED: 1}
    hashes = [
        UserHashes.load(tmp_path / name / private_files.USERS_SALT).hash("alice", "default")
        for name in ("state", "new")
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("disk", ["local", "network"])
async def test_an_open_store_is_backed_up(tmp_path, disk):
    state = tmp_path / "state"
    await fill(state, disk)
    async with await SqliteStore.open(state / private_files.STORE, disk=disk) as store:
        make_backup(Places({ONLY: state}), tmp_path / "backup")
        await store.submit(RolloutRequest(rollout_id="later", task=Task(environment="calc")))
    restore_backup(tmp_path / "backup", Places({ONLY: tmp_path / "new"}))
    async with await SqliteStore.open(tmp_path / "new" / private_files.STORE, disk=disk) as store:
        assert await store.counts() == {RolloutState.QUEUED: 1}


async def test_a_batch_that_was_leased_is_leased_after_a_restore(tmp_path):
    state = tmp_path / "state"
    await fill(state)
    async with await SqliteStore.open(state / private_files.STORE) as store:
        await create_run(store)
        await make_ready(store, 0, 1)
        leased = await leased_batch(store, "a trainer")
        make_backup(Places({ONLY: state}), tmp_path / "backup")
        await store.runs.give_back("a", 0)
    restore_backup(tmp_path / "backup", Places({ONLY: tmp_path / "new"}))
    async with await SqliteStore.open(tmp_path / "new" / private_files.STORE) as store:
        assert isinstance(await lease_batch(store, "another trainer"), NoBatch)
        await store.runs.give_back("a", 0)  # its holder's lease would also expire by itself
        assert (await leased_batch(store, "another trainer")).groups == leased.groups


async def test_only_the_owner_can_read_a_backup_and_what_was_restored(backup, tmp_path):
    restore_backup(backup, Places({ONLY: tmp_path / "new"}))
    found = [path for folder in (backup, tmp_path / "new") for path in (folder, *folder.rglob("*"))]
    assert {path.stat().st_mode & 0o077 for path in found} == {0}


@pytest.mark.slow
async def test_databases_are_copied_as_they_all_were_at_one_moment(tmp_path):
    """A writer counts in one database after the other, as a service does with rollouts and live sessions."""
    paths, done = [tmp_path / f"{number}" for number in range(6)], threading.Event()
    for path in paths:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (n); INSERT INTO t VALUES (0)")
    writer = threading.Thread(target=count_in_turn, args=(paths, done))
    writer.start()
    try:
        for _ in range(30):
            found = []
            with pinned(paths) as databases:
                for path in paths:
                    databases.copy(path, tmp_path / "copy")
                    with closing(sqlite3.connect(tmp_path / "copy")) as database:
                        found += database.execute("SELECT n FROM t").fetchone()
            assert found == sorted(found, reverse=True), "one that comes later was never counted first"
            assert found[0] - found[-1] <= 1
    finally:
        done.set()
        writer.join()


def count_in_turn(paths: list[Path], done: threading.Event) -> None:
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(sqlite3.connect(path, isolation_level=None, timeout=60))) for path in paths
        ]
        for connection in connections:
            connection.execute("PRAGMA synchronous = OFF")
        while not done.is_set():
            for connection in connections:
                connection.execute("UPDATE t SET n = n + 1")


async def test_a_damaged_database_is_no_backup(tmp_path):
    await fill(tmp_path / "state")
    path = tmp_path / "state" / private_files.STORE
    content = path.read_bytes()
    path.write_bytes(content[:8192].ljust(len(content), b"Z"))
    with pytest.raises(StoreError) as caught:
        make_backup(Places({ONLY: tmp_path / "state"}), tmp_path / "backup")
    assert caught.value.hint
    assert not (tmp_path / "backup").exists()


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed byte": (
        lambda backup: change(backup / STATES / ONLY / private_files.STORE),
        "not what was written",
    ),
    "a missing file": (
        lambda backup: (backup / STATES / ONLY / private_files.USERS_SALT).unlink(),
        "cannot be read",
    ),
    "another file": (lambda backup: (backup / STATES / ONLY / "other").touch(), "not part of it"),
    "no manifest": (lambda backup: (backup / MANIFEST).unlink(), "cut off"),
    "a newer format": (lambda backup: (backup / MANIFEST).write_text('{"format": 2}'), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_nothing_is_restored_from_a_backup_with(backup, tmp_path, damage):
    harm, why = DAMAGES[damage]
    harm(backup)
    with pytest.raises(ConfigurationError, match=why) as caught:
        restore_backup(backup, Places({ONLY: tmp_path / "new"}))
    assert caught.value.hint
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [*private_files.DATABASES, *private_files.DOCUMENTS, f"{private_files.STORE}-wal"])
async def test_nothing_is_restored_over_data(backup, tmp_path, name):
    state = tmp_path / "new"
    state.mkdir()
    (state / name).write_text("data")
    with pytest.raises(ConfigurationError, match="has data") as caught:
        restore_backup(backup, Places({ONLY: state}))
    assert name in str(caught.value)
    assert [path.name for path in state.iterdir()] == [name]


async def test_what_an_error_leaves_unfinished_is_removed(backup, tmp_path):
    state = tmp_path / "new"
    async with SqliteLiveStore(state / private_files.LIVE_STORE):
        (state / private_files.LIVE_STORE).rename(tmp_path / "moved")  # it still has its lock
        for log in ("-wal", "-shm"):
            (state / f"{private_files.LIVE_STORE}{log}").unlink(missing_ok=True)
        with pytest.raises(StoreError, match="in use by the process"):
            restore_backup(backup, Places({ONLY: state}))
    assert {path.suffix for path in state.iterdir()} <= {".lock"}


async def test_a_restore_that_is_told_to_end_leaves_nothing(backup, tmp_path, monkeypatch):
    def copied_and_told(source: Path, target: Path) -> None:
        copy(source, target)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(restore, "copy", copied_and_told)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        ended = CliRunner().invoke(app, ["restore", str(backup), "--state-dir", str(tmp_path / "new")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.exit_code == 128 + signal.SIGTERM
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".lock"}


async def test_a_state_that_is_restored_in_part_is_neither_opened_nor_backed_up(backup, tmp_path, monkeypatch):
    """The kernel may end a restore after any of its copies, and then nothing is undone."""
    new, copied = tmp_path / "new", []

    def copied_and_looked_at(source: Path, target: Path) -> None:
        copy(source, target)
        copied.append(target.name)
        with pytest.raises(ConfigurationError, match="restore that has not ended") as caught:
            open_state_folder(new)
        assert "restore the backup again" in caught.value.hint
        with pytest.raises(ConfigurationError, match="restore that has not ended"):
            make_backup(Places({ONLY: new}), tmp_path / "of a part")

    monkeypatch.setattr(restore, "copy", copied_and_looked_at)
    restore_backup(backup, Places({ONLY: new}))
    assert set(copied) == {*private_files.DATABASES, private_files.USERS_SALT}
    open_state_folder(new)
    make_backup(Places({ONLY: new}), tmp_path / "of all")


async def test_a_backup_goes_only_into_an_empty_folder(backup, tmp_path):
    with pytest.raises(ConfigurationError, match="is not empty"):
        make_backup(Places({ONLY: tmp_path / "state"}), backup)
    with pytest.raises(ConfigurationError, match="not the state folder"):
        make_backup(Places({ONLY: tmp_path / "elsewhere"}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


async def test_a_backup_of_a_node_leaves_the_store_to_another(tmp_path):
    """An old store may be left from the time before the nodes shared one."""
    await fill(tmp_path / "state")
    manifest = make_backup(Places({ONLY: tmp_path / "state"}, owns_store=False), tmp_path / "backup")
    assert {Path(name).name for name in manifest.files} == {
        private_files.LIVE_STORE,
        private_files.USERS_SALT,
    }
    restore_backup(tmp_path / "backup", Places({ONLY: tmp_path / "new"}, owns_store=False))
    assert (tmp_path / "new" / private_files.USERS_SALT).exists()


async def test_a_backup_that_does_not_fit_is_refused(backup, tmp_path):
    new, other = tmp_path / "new", tmp_path / "other"
    places = [Places({ONLY: new}, owns_store=False), Places({"node-0": new, "node-1": other})]
    for each in places:
        with pytest.raises(ServiceError) as caught:
            restore_backup(backup, each)
        assert caught.value.hint
    assert not new.exists()


async def test_a_backup_of_another_number_of_shards_is_refused(backup, tmp_path):
    manifest = Manifest.read(backup)
    (backup / MANIFEST).unlink()
    for number in range(2):
        dump = backup / f"shard-{number}" / REDIS_DUMP
        dump.parent.mkdir()
        dump.write_bytes(b"")
    manifest.model_copy(update={"files": describe_all(backup)}).write(backup)
    store = StoreSettings(url=["redis://one", "redis://two", "redis://three"])
    with pytest.raises(ConfigurationError, match="2 shards, and the settings name 3"):
        restore_backup(backup, Places.of(Settings(state_dir=tmp_path / "new", store=store)))
