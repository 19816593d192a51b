"""Keys reach a terminal as they were typed, whoever stops to type."""

import os
from select import PIPE_BUF
from types import SimpleNamespace
from typing import Any

import anyio

from sandboxes.runtime.pipes import INPUT, Pipes
from sandboxes.sessions.terminal import SandboxTerminal
from sandboxes.sessions.terminal_program import FRAME


def frames(data: bytes) -> list[bytes]:
    found = []
    while data:
        _, _, length = FRAME.unpack_from(data)
        found.append(data[FRAME.size : FRAME.size + length])
        assert len(found[-1]) == length
        data = data[FRAME.size + length :]
    return found


async def test_a_caller_that_is_cancelled_leaves_no_half_of_a_frame(tmp_path):
    pipes = Pipes(tmp_path / "token")
    reading = pipes.fds[INPUT]
    program: Any = SimpleNamespace(send=pipes.write)
    terminal = SandboxTerminal(program, b"")
    with anyio.move_on_after(0.05) as scope:
        await terminal.type(b"a" * 1_000_000)
    assert scope.cancelled_caught
    pasted = os.read(reading, 1 << 20)
    assert await terminal.type(b"b" * PIPE_BUF)
    assert set(b"".join(frames(pasted))) == set(b"a")
    assert b"".join(frames(os.read(reading, 1 << 20))) == b"b" * PIPE_BUF
    pipes.close()
