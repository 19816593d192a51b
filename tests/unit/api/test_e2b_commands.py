"""Commands of E2B's sandboxes send all that they print, however late clients read, and no client holds up another."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb
from protobuf import Oneof

from rollout_service.server.e2b import commands
from rollout_service.server.e2b.boxes import CURRENT_BOX
from rollout_service.server.e2b.commands import BUFFERED, IDLE_SECONDS, Command, ProcessCalls, _events


class Printing:
    """A program that prints pieces, and ends when its pipe has room for the last one."""

    group = 1

    def __init__(self, pieces: int, *, chatters: bool = False) -> None:
        """With `chatters`, something that it has left in the background prints on and on."""
        self._left = [b"%d" % number for number in range(pieces)]
        self._chatters = chatters
        self._ended = anyio.Event()

    async def receive(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        if len(self._left) <= 2:
            self._ended.set()
        if not self._left and not self._chatters:
            await anyio.sleep_forever()  # the background keeps the pipe open
        return self._left.pop(0) if self._left else b"."

    async def receive_errors(self) -> bytes:
        return b""

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def leave_group(self) -> None:
        pass


def box_with(program: Printing) -> Any:
    @asynccontextmanager
    async def start(*_: object, **__: object) -> AsyncIterator[Printing]:
        yield program

    return SimpleNamespace(sandbox=SimpleNamespace(program=start))


def make_command() -> Command:
    return Command(process_pb.StartRequest(process=process_pb.ProcessConfig(cmd="print")), deadline=math.inf)


async def output_of(program: Printing, *, pause: float) -> bytes:
    """Return what a client receives that begins to read after a pause."""
    command, box = make_command(), box_with(program)
    events, found = command.listen(), b""
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks, events:
            tasks.start_soon(command.run, box)
            await anyio.sleep(pause)
            async for event in events:
                if event.event.field == "end":
                    break
                found += event.event.value.output.value
    return found


@pytest.mark.parametrize("pause", [0, 2 * IDLE_SECONDS])
async def test_a_client_that_reads_late_gets_the_last_piece(pause):
    assert await output_of(Printing(BUFFERED + 2), pause=pause) == b"0123456789"


async def test_a_terminal_that_cannot_be_made_says_why(local_sandbox):
    local_sandbox._launched = replace(local_sandbox._launched, python="no-such-python")
    size = process_pb.PTY.Size(rows=9, cols=9)
    process = process_pb.ProcessConfig(cmd="bash")
    command = Command(process_pb.StartRequest(process=process, pty=process_pb.PTY(size=size)), deadline=math.inf)
    box: Any = SimpleNamespace(sandbox=local_sandbox, scope=anyio.CancelScope())
    with command.listen() as events:
        await command.run(box)
        refused = await events.receive()
    assert "no terminal could be made" in str(refused)
    assert "install python3" in str(refused)


@pytest.mark.parametrize("pause", [0, 2 * IDLE_SECONDS])
async def test_a_command_ends_whatever_it_has_left_in_the_background(pause):
    found = await output_of(Printing(3, chatters=True), pause=pause)
    assert found.startswith(b"012")


async def test_a_client_that_goes_before_the_command_has_started_does_not_hold_it_up():
    command = make_command()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, _events(command, command.listen()))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(20):
        await command.run(box_with(Printing(2 * BUFFERED)))


async def test_a_terminal_that_takes_nothing_holds_up_no_call(monkeypatch):
    monkeypatch.setattr(commands, "INPUT_SECONDS", 0.01)
    stuck: Any = SimpleNamespace(resize=lambda *_: anyio.sleep_forever(), type=lambda _: anyio.sleep_forever())
    command = make_command()
    command.terminal, command.program = stuck, Printing(1)  # type: ignore[assignment]
    CURRENT_BOX.set(SimpleNamespace(commands=[command]))  # type: ignore[arg-type]
    selector = process_pb.ProcessSelector(selector=Oneof("pid", Printing.group))
    size = process_pb.PTY(size=process_pb.PTY.Size(rows=9, cols=9))
    keys = process_pb.ProcessInput(input=Oneof("pty", b"x"))
    for call, request in (
        (ProcessCalls().update, process_pb.UpdateRequest(process=selector, pty=size)),
        (ProcessCalls().send_input, process_pb.SendInputRequest(process=selector, input=keys)),
    ):
        with anyio.fail_after(20), pytest.raises(ConnectError) as caught:
            await call(request, None)
        assert caught.value.code == Code.DEADLINE_EXCEEDED
