"""What it takes to save a sandbox and to read it is bounded, extended attributes of files included."""

import errno
import io
import os
import re
import sys
import tarfile
from pathlib import Path

import pytest

from sandboxes.providers.apptainer.launch import saved_files
from sandboxes.providers.apptainer.launch.saved_files import ATTRIBUTE, PAGE, Saver
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
            assert not archive.members, "they would be kept in memory until the end"
    finally:
        os.close(handle)
    written.seek(0)
    return tarfile.open(fileobj=written).getmembers()


def test_attributes_count_as_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_files, "stop", lambda code, _: sys.exit(code))  # which ends the process
    _, file = save(folder, 4 * PAGE)
    values = [value for key, value in file.pax_headers.items() if key.startswith(ATTRIBUTE)]
    assert [bytes.fromhex(value) for value in values] == [VALUE] * 3
    assert not re.search(r"\d{9}", "|".join(values)), "tarfile searches for numbers before a space"
    with pytest.raises(SystemExit) as ended:
        save(folder, 2 * PAGE)
    assert ended.value.code == TOO_LARGE
