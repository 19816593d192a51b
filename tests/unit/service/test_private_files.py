"""Only the service's user can read its state files, and a state folder that cannot be used is reported."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import make_private, open_state_folder, write_private
from rollout_service.store.sqlite.store import SqliteStore


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


async def test_the_database_is_private_in_a_folder_that_is_not(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    path = folder / "rollouts.sqlite3"
    for _ in range(2):
        async with await SqliteStore.open(path):
            found = {file.name: mode(file) for file in folder.iterdir()}
            assert {"rollouts.sqlite3", "rollouts.sqlite3-wal", "rollouts.sqlite3-shm"} <= found.keys()
            assert set(found.values()) == {0o600}
        for file in folder.iterdir():  # as a copy may be
            file.chmod(0o644)
    assert mode(folder) == 0o755


def test_a_file_is_written_whole_and_private(tmp_path):
    path = tmp_path / "backends.json"
    write_private(path, b"[]")
    path.chmod(0o666)
    write_private(path, b"[1]")
    assert (path.read_bytes(), mode(path)) == (b"[1]", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_its_name_only_once_its_data_is_on_the_disk(tmp_path, monkeypatch):
    path, seen = tmp_path / "backends.json", []

    def fsync(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_size, path.read_bytes()))

    write_private(path, b"[]")
    monkeypatch.setattr(os, "fsync", fsync)
    write_private(path, b"[1]")
    write_private(path, b"[2]", durable=False)
    assert (seen, path.read_bytes()) == ([(3, b"[]")], b"[2]")


def test_a_private_file_keeps_its_mode_and_content(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"y")
    path.chmod(0o400 if os.geteuid() == 0 else 0o600)
    before = mode(path)
    make_private(path)
    assert (path.read_bytes(), mode(path)) == (b"y", before)


def test_a_new_folder_is_private_and_a_failure_to_make_it_is_reported(tmp_path):
    assert mode(open_state_folder(tmp_path / "a" / "b")) == 0o700
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(ConfigurationError, match="state folder") as refused:
            open_state_folder(folder)
        assert "--state-dir" in refused.value.hint
