"""An interrupter takes its steps in order, accepts only reports with its nonce, and knows when a shell is dead."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from sandboxes.errors import SessionDiedError
from sandboxes.runtime.control import Child, ControlShell
from sandboxes.runtime.pipes import Pipes
from sandboxes.sessions.bash import REPORT, Interrupter, InterruptTiming

SHORT = InterruptTiming(
    interrupt_steps=(("INT", 0.05),),
    timeout_steps=(("INT", 0.05), ("TERM", 0.05), ("KILL", 0.05)),
    nudge_pause=0.01,
    tries=7,
    questions=2,
    question_pause=0.2,
    looks=1,
)


class Bench:
    """An interrupter whose shell and control shell are the test."""

    def __init__(self, folder: Path) -> None:
        ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._control = ControlShell(ours, folder)
        pipes = Pipes(folder / "shell")
        self._reports = os.open(folder / "shell.st", os.O_WRONLY)
        self._stdin = os.open(folder / "shell.in", os.O_RDONLY | os.O_NONBLOCK)
        self.child = Child(self._control, pipes)
        self.child.group = 42
        self.interrupter = Interrupter(self._control, self.child, SHORT)

    def report(self, *lines: str) -> None:
        os.write(self._reports, "".join(f"{line}\n" for line in lines).encode())

    def end_shell(self) -> None:
        os.close(self._reports)
        self._reports = -1

    def messages(self) -> list[list[str]]:
        """Return the messages sent to the control shell."""
        fields = self._theirs.recv(65536).decode().split("\0")[:-1]
        found = []
        while fields:
            count = int(fields.pop(0))
            found.append(fields[:count])
            del fields[:count]
        return found

    def questions(self) -> int:
        """Return how many reports the shell was asked for."""
        try:
            return os.read(self._stdin, 65536).decode().count(REPORT)
        except BlockingIOError:
            return 0

    def answer(self) -> None:
        """Report as the shell was asked to."""
        line = os.read(self._stdin, 65536).decode().splitlines()[-1]
        self.report(f"{line.removeprefix(REPORT).removesuffix('&&:').strip()} 0")

    def close(self) -> None:
        self.child.group = 0
        self.child.discard()
        self._control.close()
        self._theirs.close()
        os.close(self._stdin)
        if self._reports >= 0:
            os.close(self._reports)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    try:
        with anyio.fail_after(10):
            yield made
    finally:
        made.close()


async def test_a_report_counts_only_with_its_nonce(bench):
    command = bench.interrupter.begin()
    bench.report("other 5", f"{command.nonce} x", f"{command.nonce} 3")
    assert await bench.interrupter.read_report(command.nonce) == 3


async def test_the_jobs_of_the_report_before_are_spared(bench):
    command = bench.interrupter.begin()
    bench.report("17", "23", "99999999999", "no job")
    with pytest.raises(TimeoutError):
        await bench.interrupter.read_report(command.nonce, anyio.current_time() + 0.02)
    assert await bench.interrupter.interrupt(command, anyio.current_time() + 60) is None
    [stop, *_] = bench.messages()
    assert stop == ["stop", "42", "INT", str(command.since), "1", "17", "23"]


async def test_a_time_out_goes_through_its_steps_and_nudges_the_shell_in_between(bench):
    command = bench.interrupter.begin()
    assert await bench.interrupter.end_overdue(command) is None
    messages = bench.messages()
    stops = [(message[2], message[4]) for message in messages if message[0] == "stop"]
    assert stops == [("INT", "1"), ("TERM", "7"), ("KILL", "7")]
    assert ["interrupt", "42"] in messages
    assert bench.questions() > 0


async def test_the_report_of_an_interrupted_command_ends_the_steps(bench):
    command = bench.interrupter.begin()
    bench.report(f"{command.nonce} 130")
    assert await bench.interrupter.end_overdue(command) == 130
    assert [message[2] for message in bench.messages() if message[0] == "stop"] == ["INT"]


async def test_a_request_stops_the_wait_for_a_report_and_is_answered_at_the_end(bench):
    command = bench.interrupter.begin()
    events = []

    async def ask() -> None:
        await bench.interrupter.request()
        events.append("answered")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with pytest.raises(TimeoutError):
            await bench.interrupter.read_report(command.nonce, stops_at_request=True)
        assert bench.interrupter.is_requested
        events.append("stopped")
        bench.interrupter.end()
    assert events == ["stopped", "answered"]
    assert not bench.interrupter.is_requested


async def test_a_request_gives_up_when_its_steps_are_over(bench):
    bench.interrupter.begin()
    await bench.interrupter.request()
    assert bench.interrupter.is_requested


async def settle(bench: Bench, *, answers: bool = False) -> list[str]:
    """Answer for the control shell, and for the shell if it `answers`; return how the settling ended."""
    ended = []

    async def run() -> None:
        try:
            await bench.interrupter.settle()
            ended.append("settled")
        except SessionDiedError as error:
            ended.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        [[_, token]] = bench.messages()
        bench._theirs.send(f"{token}\n".encode())
        if answers:
            with anyio.fail_after(5):
                while not ended:
                    await anyio.sleep(0.001)
                    with suppress(BlockingIOError):
                        bench.answer()
    return ended


async def test_a_shell_that_answers_has_settled(bench):
    assert await settle(bench, answers=True) == ["settled"]


async def test_a_shell_that_does_not_answer_is_dead(bench):
    assert await settle(bench) == ["the shell did not settle after it was interrupted"]
    assert bench.questions() == 2


async def test_a_shell_that_ends_while_it_settles_is_dead(bench):
    bench.end_shell()
    assert await settle(bench) == ["the shell ended while the command ran"]
