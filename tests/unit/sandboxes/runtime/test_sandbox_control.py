"""Messages to the control shell arrive whole, whatever happens to their senders."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandboxes import SandboxClosedError
from sandboxes.runtime import control
from sandboxes.runtime.control import ControlShell

LARGE = "x" * 4_000_000


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[ControlShell, socket.socket]]:
    ours, theirs = socket.socketpair()
    shell = ControlShell(ours, tmp_path)
    with theirs:
        yield shell, theirs
        shell.close()


def read_all(end: socket.socket) -> bytes:
    end.settimeout(0.2)
    parts = []
    while True:
        try:
            parts.append(end.recv(1 << 20))
        except TimeoutError:
            return b"".join(parts)


async def test_a_cancelled_sender_sends_the_rest_of_what_it_began(ends):
    shell, theirs = ends
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.send, "spawn", LARGE)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            read = await anyio.to_thread.run_sync(read_all, theirs)
    await shell.send("end")
    read += read_all(theirs)
    assert read == b"2\0spawn\0" + LARGE.encode() + b"\0" + b"1\0end\0"


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
