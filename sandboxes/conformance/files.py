"""Files: any bytes, any name, any size, completely or not at all, and errors that say what is wrong."""

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace

import anyio

from sandboxes.conformance.expectations import expect, expect_error
from sandboxes.contract import Sandbox, SandboxProvider, SandboxSpec
from sandboxes.errors import (
    EditMatchError,
    FileMissingError,
    FileTooLargeError,
    LimitExceededError,
    SandboxError,
    SandboxFileError,
)


async def files_round_trip(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Files read back exactly as written, at paths with any characters, and sessions see the same."""
    data = bytes(range(256)) * 2000
    name = "a dir/ü 'quoted' $name\n.bin"
    await sandbox.write_file(name, data)
    expect(await sandbox.read_file(name) == data, "other bytes")
    expect(await sandbox.read_file(f"{sandbox.workdir}/{name}") == data, "relative is not absolute")
    entries = await sandbox.list("a dir")
    expect([(entry.name, entry.size) for entry in entries] == [("ü 'quoted' $name\n.bin", len(data))], entries)
    expect(await sandbox.read_file(name, limit=len(data)) == data, "its size is above the limit")
    await expect_error(FileTooLargeError, sandbox.read_file(name, limit=len(data) - 1))
    await expect_error(FileMissingError, sandbox.read_file("missing"))
    await expect_error(FileMissingError, sandbox.list("missing"))


async def files_edit(sandbox: Sandbox, _: SandboxProvider) -> None:
    """An edit replaces a text that occurs exactly once, or all occurrences if asked."""
    await sandbox.write_file("f.txt", "one two\ntwo\n")
    expect(await sandbox.edit_file("f.txt", "one", "1") == 1, "not once")
    await expect_error(EditMatchError, sandbox.edit_file("f.txt", "two", "2"))
    await expect_error(EditMatchError, sandbox.edit_file("f.txt", "three", "3"))
    expect(await sandbox.edit_file("f.txt", "two", "2", replace_all=True) == 2, "not twice")
    expect(await sandbox.read_file("f.txt") == b"1 2\n2\n", await sandbox.read_file("f.txt"))
    await sandbox.write_file("binary", b"\xff\xfe")
    await expect_error(SandboxError, sandbox.edit_file("binary", "a", "b"))


async def files_to_another(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A tree can be streamed to a fresh sandbox."""
    await (await sandbox.bash()).run("mkdir -p out/d && echo hi >out/d/f && ln -s d out/link")
    async with await provider.start(SandboxSpec()) as fresh:
        await fresh.import_path(fresh.workdir, sandbox.export_path("out"))
        expect(await fresh.read_file("out/d/f") == b"hi\n", "not copied")
        kinds = {entry.name: entry.kind for entry in await fresh.list("out")}
        expect(kinds == {"d": "directory", "link": "symlink"}, kinds)


async def files_stream(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Files of many mebibytes stream in and out unchanged, within a limit."""
    piece, count = bytes(range(251)) * 1000, 100
    await sandbox.write_stream("large", _repeated(piece, count))
    sent, found = hashlib.sha256(piece * count), hashlib.sha256()
    async for part in sandbox.read_stream("large"):
        found.update(part)
    expect(found.digest() == sent.digest(), "other bytes")
    expect((await sandbox.list())[0].size == len(piece) * count, await sandbox.list())

    async def read(limit: int) -> None:
        async for _ in sandbox.read_stream("large", limit=limit):
            pass

    await expect_error(FileTooLargeError, read(1000))
    await expect_error(FileMissingError, _first(sandbox, "missing"))
    expect(0 < len(await _first(sandbox, "large")) <= 65536, "too little or too much came")  # the rest is left


async def files_whole_or_not(sandbox: Sandbox, _: SandboxProvider) -> None:
    """A write that fails or is cancelled leaves the old contents and no other file; modes and links are kept."""
    await sandbox.write_file("f", "old")
    await sandbox.exec(["bash", "-c", "chmod 750 f; ln -s f link"])

    async def failing() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise ConnectionResetError

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"y" * 1000
            await anyio.sleep(0.01)

    with suppress(ConnectionResetError):
        await sandbox.write_stream("f", failing())
    with anyio.move_on_after(0.5):
        await sandbox.write_stream("f", endless())
    expect(await sandbox.read_file("f") == b"old", await sandbox.read_file("f"))
    await sandbox.write_stream("link", _repeated(b"new", 2))
    result = await sandbox.exec(["bash", "-c", "ls -A; stat -c %a f; cat f; readlink link"])
    expect(result.stdout == b"f\nlink\n750\nnewnewf\n", result)


async def files_odd_names(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Names of any bytes are listed, read and written: newlines, dashes, stars, and bytes that are not UTF-8."""
    names = ["-n", "*", "a\nb", "tail\n", " ", "'", "\\", os.fsdecode(b"\xff\xfe"), "ü"]
    for name in names:
        await sandbox.write_file(f"odd/{name}", name.encode("utf-8", "surrogateescape"))
    entries = await sandbox.list("odd")
    expect(sorted(entry.name for entry in entries) == sorted(names), entries)
    for entry in entries:
        content = await sandbox.read_file(f"odd/{entry.name}")
        expect(content == entry.name.encode("utf-8", "surrogateescape"), (entry, content))


async def files_no_files(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Pipes, devices and folders are refused as files at once, not only when somebody writes to them."""
    await sandbox.exec(["bash", "-c", "mkfifo pipe; mkdir folder; ln -s /dev/zero zero; ln -s loop loop"])
    for name in ("pipe", "folder", "zero", "loop"):
        with anyio.fail_after(30):
            await expect_error(SandboxFileError, sandbox.read_file(name))
            await expect_error(SandboxFileError, _first(sandbox, name))
    for name in ("pipe", "folder", "zero"):
        await expect_error(SandboxFileError, sandbox.write_file(name, b"x"))
        await expect_error(SandboxFileError, sandbox.write_stream(name, _repeated(b"x", 3)))
    kinds = {entry.name: entry.kind for entry in await sandbox.list()}
    expect(kinds == {"pipe": "other", "folder": "directory", "zero": "symlink", "loop": "symlink"}, kinds)
    await expect_error(SandboxFileError, sandbox.list("pipe"))


async def files_forbidden(sandbox: Sandbox, _: SandboxProvider) -> None:
    """Reading or writing without permission is an error that says so."""
    if (await sandbox.exec(["id", "-u"])).stdout == b"0\n":
        return  # who is root inside may do all of this
    await sandbox.exec(["bash", "-c", "echo secret >f; chmod 000 f; mkdir d; chmod 555 d"])
    for call in (sandbox.read_file("f"), sandbox.write_file("f", "x"), sandbox.write_file("d/x", "x")):
        error = await expect_error(SandboxFileError, call)
        expect("ermission denied" in str(error), error)


async def files_full_disk(sandbox: Sandbox, provider: SandboxProvider) -> None:
    """A write without enough room says so and leaves nothing, and the room is free again."""
    if "disk" not in provider.enforced:
        return  # the provider claims nothing
    spec = replace(sandbox.spec, disk_bytes=32 * 1024 * 1024)
    async with await provider.start(spec) as small:
        error = await expect_error(LimitExceededError, small.write_stream("f", _repeated(bytes(1 << 20), 64)))
        expect(isinstance(error, LimitExceededError) and error.limit == "disk", error)
        await expect_error(LimitExceededError, small.write_file("g", bytes(48 << 20)))
        expect(await small.list() == [], await small.list())
        await small.write_stream("f", _repeated(bytes(1 << 20), 8))
        expect((await small.list())[0].size == 8 << 20, await small.list())


async def _repeated(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


async def _first(sandbox: Sandbox, path: str) -> bytes:
    async with aclosing(sandbox.read_stream(path)) as parts:
        async for part in parts:
            return part
    return b""
