"""An input that is a stream is read only once, and can then be reread like a file."""

import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_service.cli.common import CommandError
from rollout_service.cli.submit.files import read_whole, reread

CONTENT = b'{"a": 1}\n' * 20_000


def _write(descriptor: int) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(CONTENT)


@pytest.fixture(params=["fifo", "descriptor", "stdin"])
def stream(request, tmp_path, monkeypatch):
    """Yield the path of a stream that holds the content."""
    if request.param == "stdin":
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(CONTENT)))
        yield Path("-")
        return
    if request.param == "fifo":
        path = tmp_path / "fifo"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=[CONTENT])
    else:
        reading, writing = os.pipe()
        path = Path(f"/dev/fd/{reading}")
        writer = threading.Thread(target=_write, args=[writing])
    writer.start()
    yield path
    writer.join()
    if request.param == "descriptor":
        os.close(reading)


def test_a_stream_can_be_read_again(stream):
    with reread(stream) as path:
        assert path.read_bytes() == path.read_bytes() == CONTENT
    assert not path.exists()


def test_a_stream_is_read_whole(stream):
    assert read_whole(stream) == CONTENT


def test_a_file_is_not_copied(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(CONTENT)
    with reread(file) as path:
        assert path == file


def test_unreadable_input_is_named(tmp_path):
    for read in (read_whole, lambda path: reread(path).__enter__()):
        with pytest.raises(CommandError, match="missing cannot be read: No such file"):
            read(tmp_path / "missing")
