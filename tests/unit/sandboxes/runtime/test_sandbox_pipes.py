"""The host's ends of pipes leave nothing behind, bound floods, and read status lines however they are split."""

import os
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.runtime.pipes import INPUT, NAMES, OUTPUT, Pipes, Reader, StatusLines, read_some, write_all


async def test_names_are_removed_once_opened(tmp_path):
    pipes = Pipes(tmp_path / "token")
    inside = os.open(tmp_path / "token.in", os.O_RDONLY | os.O_NONBLOCK)
    pipes.mark_opened()
    assert not any((tmp_path / f"token.{name}").exists() for name in NAMES)
    assert await write_all(pipes.fds[INPUT], b"hello")
    assert read_some(inside) == b"hello"
    os.close(inside)
    assert not await write_all(pipes.fds[INPUT], b"nobody reads")
    pipes.close()
    pipes.close()


def test_nothing_is_left_if_a_pipe_cannot_be_made(tmp_path):
    (tmp_path / "token.err").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileExistsError):
        Pipes(tmp_path / "token")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_writer_that_never_rests_does_not_prolong_the_end(tmp_path):
    pipes = Pipes(tmp_path / "token")
    writer = os.open(tmp_path / "token.out", os.O_WRONLY | os.O_NONBLOCK)
    reader, got = Reader(pipes.fds[OUTPUT]), bytearray()
    os.write(writer, b"first")

    def take(data: bytes) -> None:
        got.extend(data)
        os.write(writer, b"more")  # as a flood would, whenever there is room

    reader.start(take)
    reader.stop()
    assert bytes(got) == b"first"
    reader.stop()
    os.close(writer)
    pipes.unlink()
    pipes.close()


@given(lines=st.lists(st.text("ab 1", max_size=8), max_size=8), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_status_lines_survive_any_split(lines, cuts):
    data = "".join(f"{line}\n" for line in lines).encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})

    async def check() -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        status = StatusLines(reading)
        for start, end in pairwise(edges):
            os.write(writing, data[start:end])
            await anyio.lowlevel.checkpoint()
        os.close(writing)
        found = []
        while (line := await status.next()) is not None:
            found.append(line)
        os.close(reading)
        assert found == lines

    anyio.run(check)


async def test_a_line_without_end_ends_the_stream():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    status = StatusLines(reading)
    os.write(writing, b"x" * 10_000)
    with anyio.fail_after(10):
        assert await status.next() is None
    os.close(writing)
    os.close(reading)
