"""The size of a saved sandbox is bounded, extended attributes of files included."""

import errno
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from sandboxes.providers.apptainer.launch import saved_files
from sandboxes.providers.apptainer.launch.saved_files import PAGE, Saver
from sandboxes.runtime.tree_reader import TOO_LARGE

VALUE = b"x" * 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.touch()
    try:
        for number in range(3):
            os.setxattr(file, f"user.{number}", VALUE)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("the file system has no attributes of users")
    return tmp_path


def save(folder: Path, limit: int) -> list[tarfile.TarInfo]:
    written, handle = io.BytesIO(), os.open(folder, os.O_RDONLY)
    try:
        with tarfile.open(fileobj=written, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            Saver(archive, limit, "user.overlay.").add_folder(handle, "files")
    finally:
        os.close(handle)
    written.seek(0)
    return tarfile.open(fileobj=written).getmembers()


def test_attributes_count_as_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_files, "stop", lambda code, _: sys.exit(code))  # which ends the process
    _, file = save(folder, 4 * PAGE)
    assert sum(value == VALUE.hex() for value in file.pax_headers.values()) == 3
    with pytest.raises(SystemExit) as ended:
        save(folder, 2 * PAGE)
    assert ended.value.code == TOO_LARGE
