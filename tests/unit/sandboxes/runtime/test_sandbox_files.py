"""A sandbox's files, of any size and name, arrive whole or not at all, with typed errors."""

import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandboxes import FileEntry, LocalConfig, SandboxSpec, make_provider
from sandboxes.errors import FileTooLargeError, SandboxFileError
from sandboxes.runtime import files

pytestmark = pytest.mark.slow

NAMES = st.binary(min_size=1, max_size=60).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in {b".", b".."}
)


async def pieces(data: bytes, size: int = 4096) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES, data=st.binary(max_size=10_000), piece=st.integers(1, 5000))
@example(name=b"-", data=b"", piece=1)
def test_any_bytes_under_any_name_come_back(tmp_path_factory, name, data, piece):
    async def round_trip() -> None:
        provider = make_provider(LocalConfig(provider="local"), tmp_path_factory.mktemp("state"))
        async with await provider.start(SandboxSpec()) as sandbox:
            path = os.fsdecode(b"d/" + name)
            await sandbox.write_stream(path, pieces(data, piece))
            assert await sandbox.read_file(path) == data
            [entry] = await sandbox.list("d")
            assert (os.fsencode(entry.name), entry.kind, entry.size) == (name, "file", len(data))
            await sandbox.write_file(path, data[::-1])
            assert b"".join([part async for part in sandbox.read_stream(path)]) == data[::-1]
        await provider.close()

    anyio.run(round_trip)


async def test_a_file_whose_writing_is_cancelled_leaves_nothing(local_sandbox):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(local_sandbox.write_file, "f", bytes(100_000_000))
        with anyio.fail_after(60):
            while not os.listdir(local_sandbox.workdir):  # noqa: PTH208
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert os.listdir(local_sandbox.workdir) == []  # noqa: PTH208


async def test_a_reader_inside_never_sees_half_a_file(local_sandbox):
    path = Path(local_sandbox.workdir) / "f"
    sizes = set()
    path.write_bytes(b"a" * 300_000)
    async with anyio.create_task_group() as tasks:

        async def write() -> None:
            for letter in (b"b", b"c", b"d"):
                await local_sandbox.write_stream("f", pieces(letter * 300_000, 1000))
            tasks.cancel_scope.cancel()

        tasks.start_soon(write)
        while True:
            found = path.read_bytes()
            sizes.add(len(found))
            assert len(set(found)) == 1
            await anyio.sleep(0.001)
    assert sizes == {300_000}


async def test_a_file_that_grows_is_read_up_to_its_size_and_one_that_shrinks_is_an_error(local_sandbox):
    path = Path(local_sandbox.workdir) / "f"
    size = 8 * 1024 * 1024
    path.write_bytes(b"x" * size)
    total = 0
    async for part in local_sandbox.read_stream("f"):
        if not total:
            with path.open("ab") as file:
                file.write(b"y" * 1000)
        assert b"y" not in part
        total += len(part)
    assert total == size

    async def shrink() -> None:
        async with aclosing(local_sandbox.read_stream("f")) as parts:
            async for _ in parts:
                os.truncate(path, 1000)

    with pytest.raises(SandboxFileError, match="shrank"):
        await shrink()


async def test_an_edit_cannot_make_a_file_larger_than_may_be_edited(local_sandbox):
    await local_sandbox.write_file("f", "a" * 5)
    with pytest.raises(FileTooLargeError, match="would have 20000000 bytes"):
        await local_sandbox.edit_file("f", "a", "ü" * 2_000_000, replace_all=True)
    assert await local_sandbox.read_file("f") == b"aaaaa"


async def test_kernel_files_without_a_size_are_read(local_sandbox):
    assert b"Linux version" in await local_sandbox.read_file("/proc/version")


LARGE = """
import resource, sys, anyio
from pathlib import Path
from sandboxes import FileEntry, LocalConfig, SandboxSpec, make_provider

SIZE, PIECE = 1 << 28, bytes(range(256)) * 4096

async def pieces():
    for _ in range(SIZE // len(PIECE)):
        yield PIECE

async def main():
    provider = make_provider(LocalConfig(provider="local"), Path(sys.argv[1]))
    async with await provider.start(SandboxSpec()) as sandbox:
        await sandbox.write_file("small", b"x")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await sandbox.write_stream("f", pieces())
        total = 0
        async for part in sandbox.read_stream("f"):
            assert part[:1] == PIECE[total % 256 : total % 256 + 1]
            total += len(part)
        assert total == SIZE, total
        await sandbox.exec(["truncate", "-s", "20G", "f"])
        total = 1 << 26
        async for part in sandbox.read_stream("f"):
            total -= len(part)
            if total <= 0:
                break
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024
    await provider.close()

anyio.run(main)
"""


@pytest.mark.timeout(170)
async def test_a_large_file_goes_through_a_few_mebibytes(tmp_path):
    done = await anyio.run_process([sys.executable, "-c", LARGE, str(tmp_path)], check=False)
    assert done.returncode == 0, done.stderr.decode()


async def test_a_listing_of_many_files_does_not_hold_up_the_event_loop(local_sandbox, monkeypatch):
    names, seen, parse = [f"{number:04}" for number in range(3000)], set(), files._parse_entry
    for name in names:
        (Path(local_sandbox.workdir) / name).touch()

    def note(path: str, part: bytes) -> FileEntry:
        seen.add(threading.current_thread())
        return parse(path, part)

    monkeypatch.setattr(files, "_parse_entry", note)
    with anyio.fail_after(30):
        assert [entry.name for entry in await local_sandbox.list()] == names
    assert seen
    assert threading.main_thread() not in seen
