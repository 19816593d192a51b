"""Launchers are forked by a process that may be killed or hang, and is then replaced."""

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest

from sandboxes.errors import SandboxClosedError, SandboxStartError
from sandboxes.host.children import ForkedChild, LingeringChildren, wait_exit
from sandboxes.host.kernel_calls import alone
from sandboxes.host.processes import MARKER, sandbox_of
from sandboxes.providers.apptainer import fork_server
from sandboxes.providers.apptainer.fork_server import ForkServer
from sandboxes.providers.apptainer.launch.fork_server import ANSWER_BYTES, LaunchRequest
from tests.support.waiting import until

ID = "0123abcd-1"
GATE = 50


def servers() -> list[psutil.Process]:
    """Return the children of this process that launchers are forked from."""
    return [child for child in psutil.Process().children() if sandbox_of(child.pid) == "0123abcd-fork-server"]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def numbers_of_descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


@pytest.fixture
async def server() -> AsyncIterator[ForkServer]:
    server = ForkServer(LingeringChildren())
    yield server
    await server.close()
    assert not servers()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


async def launch(server: ForkServer, log: Path, gate: int = -1, **env: str) -> ForkedChild:
    """Start a launcher that makes three folders beside its log, and can then do nothing."""
    told = {MARKER: ID, "LAUNCH_SPACE": str(log.parent), "LAUNCH_BYTES": "4096"}
    with log.open("wb") as file:
        files = {1: file.fileno(), 2: file.fileno()} | ({GATE: gate} if gate >= 0 else {})
        return await server.launch(["/nothing"], told | env, files)


async def test_why_a_launcher_fails_is_in_its_log(server, log):
    child = await launch(server, log)
    assert await wait_exit(child, 20)
    assert child.poll() == 1
    assert log.read_text().startswith("launch: [Errno 2] ")
    assert sorted(path.name for path in log.parent.iterdir()) == ["conf", "data", "hosts", "log", "sockets"]


async def test_a_launcher_is_a_child_of_this_process_with_its_own_name_and_files(server, log):
    gate, hold = os.pipe()
    try:
        child = await launch(server, log, gate, LAUNCH_GATE=str(GATE))
        await until(lambda: numbers_of_descriptors(child.pid) == {1, 2, GATE})
        assert (psutil.Process(child.pid).ppid(), sandbox_of(child.pid)) == (os.getpid(), ID)
        assert len(servers()) == 1
        child.kill()
        assert await wait_exit(child, 20)
    finally:
        os.close(gate)
        os.close(hold)


async def test_a_killed_process_is_replaced(server, log):
    await wait_exit(await launch(server, log), 20)
    [process] = servers()
    process.kill()
    assert await wait_exit(await launch(server, log), 20)
    assert [each.pid for each in servers()] != [process.pid]


async def test_one_that_does_not_answer_is_ended(server, log, monkeypatch):
    await wait_exit(await launch(server, log), 20)
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(fork_server, "GRACE", 0.1)
    monkeypatch.setattr(fork_server, "TRIES", 1)
    [process] = servers()
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(SandboxStartError, match="does not answer"):
        await launch(server, log)
    assert not servers()


async def test_a_request_that_is_too_large_is_refused(server, log):
    with pytest.raises(OSError, match="too long"):
        await launch(server, log, LARGE="x" * (1 << 20))
    assert await wait_exit(await launch(server, log), 20)


@pytest.mark.parametrize(
    "begins_with",
    [{}, {"LAUNCH_LAYERS": "99 -1 0 /nothing"}, {"LAUNCH_SAVED": "/nothing", "LAUNCH_OVERLAY": "plain"}],
    ids=["nothing", "snapshot", "saved files"],
)
async def test_a_launcher_that_is_never_moved_into_its_control_groups_ends(server, log, begins_with):
    gate, hold = os.pipe()
    child = await launch(server, log, gate, LAUNCH_GATE=str(GATE), **begins_with)
    os.close(gate)
    await until(lambda: GATE in numbers_of_descriptors(child.pid))
    assert child.poll() is None
    os.close(hold)
    assert await wait_exit(child, 20)
    assert log.read_text() == "launch: the start was given up\n"


async def test_a_launch_under_way_is_finished_before_the_close_and_no_other_follows(server, log):
    started, refused = [], []

    async def start() -> None:
        try:
            started.append(await launch(server, log))
        except SandboxClosedError as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(start)
        await anyio.wait_all_tasks_blocked()
        await server.close()
    assert (len(started), len(refused)) == (1, 3)
    assert await wait_exit(started[0], 20)
    with pytest.raises(SandboxClosedError):
        await launch(server, log)


async def test_a_launcher_whose_answer_comes_late_is_not_lost(server, log, monkeypatch):
    before, known = children(), set()
    for number in range(16):
        known.add((await launch(server, log)).pid)
        with monkeypatch.context() as impatient, suppress(SandboxStartError):
            impatient.setattr(fork_server, "ANSWER_SECONDS", number / 10_000)
            known.add((await launch(server, log)).pid)
    await server.close()
    assert children() - before == known
    for pid in known:
        assert await wait_exit(ForkedChild(pid), 20)


async def test_it_says_nothing_if_the_service_is_killed_before_it_reads_an_answer(server, log, monkeypatch, tmp_path):
    said = tmp_path / "said"
    command = ["sh", "-c", f'exec "$@" 2>{said}', "sh", *alone("sandboxes.providers.apptainer.launch.fork_server")]
    monkeypatch.setattr(fork_server, "alone", lambda _: command)
    await wait_exit(await launch(server, log), 20)
    request = LaunchRequest(sandbox=ID, arguments=[], environ={}, descriptors=[2])
    with log.open("wb") as file:
        socket.send_fds(server._channel, [json.dumps(request).encode()], [file.fileno()])
    await anyio.wait_readable(server._channel)
    pid = int.from_bytes(server._channel.recv(ANSWER_BYTES, socket.MSG_PEEK), sys.byteorder)
    await server.close()
    assert await wait_exit(ForkedChild(pid), 20)
    assert said.read_text() == ""
