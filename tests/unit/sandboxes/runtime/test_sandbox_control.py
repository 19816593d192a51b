"""Messages, output and pipes of the control shell are whole and bounded, whatever happens at their ends."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import SandboxClosedError
from sandboxes.runtime import control
from sandboxes.runtime.control import ControlShell
from sandboxes.runtime.execution import ERRORS_LIMIT, ProgramPipes, run_collected
from sandboxes.runtime.pipes import (
    ERROR,
    FLOOD_BYTES,
    LEAST_COUNTED,
    NAMES,
    OUTPUT,
    OutputBuffer,
    Pipes,
    Reader,
    StatusLines,
    read_some,
)

LARGE = "x" * 4_000_000


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[ControlShell, socket.socket]]:
    ours, theirs = socket.socketpair()
    shell = ControlShell(ours, tmp_path)
    with theirs:
        yield shell, theirs
        shell.close()


@pytest.mark.parametrize("by_itself", [False, True], ids=["closed", "ends by itself"])
async def test_a_program_that_starts_as_the_sandbox_ends_is_told_so_at_once(ends, by_itself):
    shell, theirs = ends
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                with pytest.raises(SandboxClosedError, match="has ended"):
                    await shell.spawn("run", ["true"], cwd="/", env={})

            tasks.start_soon(start)
            await anyio.wait_readable(theirs)  # the message has left, and nobody opens the pipes
            (theirs if by_itself else shell).close()


async def test_a_program_that_times_out_as_its_sandbox_ends_leaves_nothing_open(ends, tmp_path):
    shell, theirs = ends
    before, unseen = len(os.listdir("/proc/self/fd")), SimpleNamespace(drain_with_call=lambda *_: ())  # noqa: PTH208
    asked: dict[str, Any] = {"stdin": b"", "cwd": "/", "env": {}, "output_limit": 1, "violations": unseen}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(run_collected, shell, ["sleep"], timeout=1, **asked))
        await anyio.wait_readable(theirs)
        status = (tmp_path / f"{theirs.recv(1000).split(bytes(1))[2].decode()}.st").open("wb", buffering=0)
        status.write(b"+5\n")
        while shell._starting:
            await anyio.lowlevel.checkpoint()
        shell.close()  # and nothing inside notices
    status.close()
    assert len(os.listdir("/proc/self/fd")) < before  # noqa: PTH208 - without the shell's own


async def test_a_program_whose_start_is_cancelled_ends_even_if_it_runs_already(local_sandbox, monkeypatch):
    shell = local_sandbox._launched.control
    note = Path(local_sandbox.workdir) / "pid"
    async with anyio.create_task_group() as tasks:
        monkeypatch.setattr(StatusLines, "_ready", lambda _: None)  # the host is late
        argv = ["bash", "-c", 'echo $$ >"$1.part"; mv "$1.part" "$1"; exec sleep 1000', "-", str(note)]
        tasks.start_soon(partial(shell.spawn, "run", argv, cwd="/", env={}))
        with anyio.fail_after(5):
            while not note.exists():
                await anyio.sleep(0.01)
        monkeypatch.undo()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(5):
        while os.path.exists(f"/proc/{note.read_text().strip()}"):  # noqa: ASYNC240, PTH110
            await anyio.sleep(0.01)


def read_all(end: socket.socket) -> bytes:
    end.settimeout(0.2)
    parts = []
    while True:
        try:
            parts.append(end.recv(1 << 20))
        except TimeoutError:
            return b"".join(parts)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_message_that_was_begun_is_sent_whole_before_any_other(ends, is_cancelled):
    shell, theirs = ends
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.send, "spawn", LARGE)
        await anyio.wait_all_tasks_blocked()
        shell.send_now("signal", "1", "KILL")
        if is_cancelled:
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            read = await anyio.to_thread.run_sync(read_all, theirs)
    await shell.send("end")
    read += read_all(theirs)
    assert read == b"2\0spawn\0" + LARGE.encode() + b"\0" + b"3\0signal\x001\0KILL\0" + b"1\0end\0"


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_short_message_waits_for_room_and_is_sent_first(ends, is_cancelled):
    shell, theirs = ends
    with suppress(BlockingIOError):
        while True:
            shell._channel.send(b"x" * 4096)
    shell.send_now("signal", "1", "KILL")
    assert shell.alive
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.send, "end")
        await anyio.wait_all_tasks_blocked()
        if is_cancelled:
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            read = await anyio.to_thread.run_sync(read_all, theirs)
    assert read.lstrip(b"x") == b"3\0signal\x001\0KILL\0" + (b"" if is_cancelled else b"1\0end\0")


async def test_a_sender_learns_at_once_that_its_sandbox_was_closed(ends):
    shell, _ = ends
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                with pytest.raises(SandboxClosedError):
                    await shell.send("spawn", LARGE)

            tasks.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            shell.close()
    assert shell._channel.fileno() < 0


async def test_a_shell_that_accepts_nothing_is_given_up(ends, monkeypatch):
    shell, _ = ends
    monkeypatch.setattr(control, "SEND_TIMEOUT", 0.1)
    with pytest.raises(SandboxClosedError, match="accepted no more messages"):
        await shell.send("spawn", LARGE)
    assert not shell.alive
    with pytest.raises(SandboxClosedError):
        await shell.send("end")


async def test_a_field_cannot_end_a_message_and_begin_another(ends):
    shell, theirs = ends
    with pytest.raises(ValueError, match="NUL"):
        await shell.send("spawn", "X=\0end\0")
    await shell.send("end")
    assert read_all(theirs) == b"1\0end\0"


async def test_an_answer_to_a_cancelled_caller_is_not_taken_by_the_next(ends):
    shell, theirs = ends
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.wait_until_done)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    first = token_of(theirs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.end_all)
        await anyio.wait_all_tasks_blocked()
        theirs.sendall(first)
        await anyio.wait_all_tasks_blocked()
        assert shell.alive
        theirs.sendall(token_of(theirs))


def token_of(end: socket.socket) -> bytes:
    """Return the answer that the shell gives."""
    return end.recv(1000).split(b"\0")[2] + b"\n"


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 100))
def test_keeps_everything_or_both_ends(parts, limit):
    buffer = OutputBuffer(limit)
    for part in parts:
        buffer.add(part)
    whole = b"".join(parts)
    assert buffer.total == len(whole)
    assert buffer.truncated == (len(whole) > limit)
    if not buffer.truncated:
        assert buffer.bytes() == whole
        return
    head, tail = (limit + 1) // 2, limit // 2
    note = f"\n[... {len(whole) - limit} bytes left out ...]\n".encode()
    assert buffer.bytes() == whole[:head] + note + whole[len(whole) - tail :]


def test_memory_does_not_grow_with_the_stream():
    buffer = OutputBuffer(1000)
    for _ in range(10_000):
        buffer.add(b"x" * 65536)
    assert sum(map(len, buffer._tail)) <= 500 + 65536
    assert buffer.total == 10_000 * 65536


def test_many_small_reads_are_kept_in_bounds():
    buffer = OutputBuffer(10)
    for number in range(10_000):
        buffer.add(str(number % 10).encode())
    assert len(buffer._tail) <= 6
    assert buffer.bytes().endswith(b"56789")


async def test_names_are_removed_once_opened(tmp_path):
    pipes = Pipes(tmp_path / "token")
    inside = os.open(tmp_path / "token.in", os.O_RDONLY | os.O_NONBLOCK)
    pipes.mark_opened()
    assert not any((tmp_path / f"token.{name}").exists() for name in NAMES)
    assert await pipes.write(b"hello")
    assert read_some(inside) == b"hello"
    os.close(inside)
    assert not await pipes.write(b"nobody reads")
    pipes.close()
    pipes.close()


async def test_an_input_that_closes_under_its_senders_ends_their_calls_alone(local_sandbox):
    """Its number is another program's next, so nobody may wait for it any more."""
    taken: list[bool] = []
    with anyio.fail_after(10):
        async with local_sandbox.program(["sleep", "1000"]) as program, anyio.create_task_group() as tasks:

            async def send() -> None:
                taken.append(await program.send(LARGE.encode()))

            tasks.start_soon(send)
            tasks.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            program.close_input()
            counted = await local_sandbox.exec(["bash", "-c", "sleep 0.1; wc -c"], stdin=LARGE.encode())
    assert (taken, counted.stdout.strip()) == ([False, False], b"4000000")


async def test_a_flood_of_single_bytes_is_read_as_slowly_as_any(tmp_path):
    """A reading of one byte takes the event loop as long as one of a page."""
    pipes = Pipes(tmp_path / "token")
    writer, readings = os.open(tmp_path / "token.out", os.O_WRONLY), list[bytes]()
    reader = Reader(pipes.fds[OUTPUT])

    def take(data: bytes) -> None:
        readings.append(data)
        os.write(writer, b"x")

    reader.start(take)
    os.write(writer, b"x")
    while not readings or reader._timer is None:
        await anyio.lowlevel.checkpoint()
    reader.close()
    os.close(writer)
    pipes.unlink()
    pipes.close()
    assert len(readings) <= FLOOD_BYTES // LEAST_COUNTED + 1


async def test_nothing_is_left_if_a_pipe_cannot_be_made(tmp_path):
    (tmp_path / "token.err").touch()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(FileExistsError):
        Pipes(tmp_path / "token")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


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


async def test_errors_that_are_read_as_they_come_are_not_cut(tmp_path):
    """However much a program has written before the event loop gets to it."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pipes = Pipes(tmp_path / "token")
    pipes.close()
    pipes.fds[ERROR] = reading
    child: Any = SimpleNamespace(pipes=pipes)
    program = ProgramPipes(child)
    text = bytes(range(256)) * (ERRORS_LIMIT // 64)
    os.write(writing, text)
    os.close(writing)
    pieces = []
    with anyio.fail_after(10):
        while piece := await program.receive_errors():
            pieces.append(piece)
    os.close(reading)
    assert (b"".join(pieces) == text, program.errors()) == (True, "")
