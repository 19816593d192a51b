"""The two sides of a link carry streams in their order and within bounds, and a relay that lies ends it."""

import base64
import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup

from sandboxes.contract import RunningProgram
from sandboxes.errors import SandboxClosedError
from sandboxes.providers.e2b.link import CONTROL_SHELL, PROGRAM, BrokenLinkError, Link
from sandboxes.providers.e2b.relay_program import (
    ASK,
    BOOT,
    CLOSE,
    CONNECT,
    CONTROL,
    DATA,
    END,
    ERR,
    HEADER,
    HELLO,
    IN,
    INSIDE_FIRST,
    MARK,
    MOST_CONNECTIONS,
    MOST_PIPE,
    NUMBER,
    OPEN,
    OUT,
    READ_SIZE,
    STATUS,
    TAKEN,
    WINDOW,
    Carrier,
    LinkChannel,
    connected,
)
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.runtime.control import ControlShell
from sandboxes.runtime.execution import running

Frame = tuple[bytes, int, bytes]
ENLARGE = f"""
import fcntl, os
for pipe in (1, 2):
    fcntl.fcntl(pipe, 1031, {MOST_PIPE})  # F_SETPIPE_SZ
    os.write(pipe, bytes({MOST_PIPE}))
"""


def frames(data: bytes) -> list[Frame]:
    found = []
    while data:
        kind, number, length = HEADER.unpack_from(data)
        found.append((kind, number, data[HEADER.size : HEADER.size + length]))
        data = data[HEADER.size + length :]
    return found


def frame(kind: bytes, number: int, content: bytes = b"") -> bytes:
    return HEADER.pack(kind, number, len(content)) + content


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    found = Carrier()
    yield found
    for channel in list(found.channels.values()):
        found.close_channel(channel)


@pytest.fixture
def ends(carrier: Carrier) -> Iterator[dict[int, int]]:
    """Add the channel of a program as the sandbox has it; yield the program's ends of its pipes."""
    pipes = {stream: os.pipe2(os.O_NONBLOCK) for stream in (IN, OUT, ERR, STATUS)}
    reads = {pipes[stream][0]: stream for stream in (OUT, ERR, STATUS)}
    carrier.channels[1] = LinkChannel(1, reads, {IN: pipes[IN][1]}, [])
    found = {IN: pipes[IN][0], **{stream: pipes[stream][1] for stream in (OUT, ERR, STATUS)}}
    yield found
    for end in found.values():
        os.close(end)


def sent(carrier: Carrier) -> list[Frame]:
    carrier.wait({}, 0.05)
    found = frames(bytes(carrier.outgoing))
    carrier.outgoing.clear()
    return found


def test_a_status_comes_after_all_that_its_program_wrote_before(carrier, ends):
    os.write(ends[STATUS], b"0\n")  # the poll may well report it first
    os.write(ends[OUT], b"x" * READ_SIZE)
    os.write(ends[ERR], b"y")
    found = sent(carrier)
    streams = [content[0] for _, _, content in found]
    assert set(streams) == {OUT, ERR, STATUS}
    assert streams.index(STATUS) > max(streams.index(OUT), streams.index(ERR))
    for end in ends.values():
        os.close(end)
    ends.clear()
    ended = [(kind, content) for kind, _, content in [*sent(carrier), *sent(carrier)]]
    assert sorted(ended) == [(END, bytes([stream])) for stream in (OUT, ERR, STATUS)]
    assert carrier.channels == {}


def test_a_stream_that_nobody_takes_stops_at_the_window(carrier, ends):
    total = 0
    for _ in range(50):
        try:
            os.write(ends[OUT], b"x" * READ_SIZE)
        except BlockingIOError:
            break
        total += sum(len(content) - 1 for _, _, content in sent(carrier))
    assert WINDOW <= total < WINDOW + READ_SIZE
    carrier.feed(frame(TAKEN, 1, NUMBER.pack(total)))
    assert [kind for kind, _, _ in sent(carrier)] == [DATA]


def test_input_that_nobody_reads_any_more_is_dropped(carrier, ends):
    os.close(ends.pop(IN))
    carrier.feed(frame(DATA, 1, bytes([IN]) + b"x" * 100))
    assert (TAKEN, 1, NUMBER.pack(100)) in [*sent(carrier), *sent(carrier)]
    carrier.feed(frame(CLOSE, 1) + frame(DATA, 1, bytes([IN]) + b"late"))
    assert carrier.channels == {}


@pytest.mark.usefixtures("ends")
def test_a_stream_in_small_pieces_takes_no_more_memory_than_in_large_ones(carrier):
    carrier.feed(frame(DATA, 1, bytes([IN]) + b"x") * READ_SIZE + frame(END, 1, bytes([IN])))
    assert len(carrier.channels[1].pending) == 2


def test_a_connection_may_end_in_one_direction_first(carrier):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(5)
        carrier.channels[1] = connected(1, ours, OUT, IN)
        carrier.feed(frame(END, 1, bytes([IN])))
        carrier.wait({}, 0.05)
        assert theirs.recv(1) == b""
        theirs.sendall(b"answer")
        assert (DATA, 1, bytes([OUT]) + b"answer") in sent(carrier)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "0" / "1")
    found.path.parent.mkdir()
    found.create(os.geteuid(), os.getegid())
    found.pipes.chmod(0o700)
    return found


class Far:
    """A link, its user, and the far end of it: what arrives there, and what comes from there."""

    def __init__(self, folder: RunFolder, inside: str = "/tmp/inside") -> None:
        ours, theirs = socket.socketpair()
        self.control = ControlShell(ours, folder.pipes)
        self.link = Link(folder, theirs, inside)
        self.data = b""
        self.said = False

    async def take(self, data: bytes) -> None:
        self.data += data

    async def say(self, *said: bytes) -> None:
        await self.link.receive(f"a profile's words\n{MARK}\n" if not self.said else "")
        self.said = True
        await self.link.receive("".join(base64.b64encode(one).decode() + "\n" for one in said))

    async def arrived(self, kind: bytes, words: bytes = b"") -> Frame:
        with anyio.fail_after(5):
            while True:
                body = self.data[len(PROGRAM + CONTROL_SHELL) :]
                for found in frames(body):
                    if found[0] == kind and words in found[2]:
                        return found
                await anyio.sleep(0.01)

    @asynccontextmanager
    async def serving(self, *said: bytes) -> AsyncIterator[TaskGroup]:
        """Serve the link in the block, in which the relay has said this first."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.link.serve, self.take)
            await self.say(*said)
            yield tasks
            self.control.close()
        self.close()

    def close(self) -> None:
        self.control.close()
        self.link.close()


HELLO_FRAME = frame(HELLO, 0, json.dumps({"ticks": 0, "prefix": ["drop", "--"], "home": "/home/x"}).encode())


async def test_the_relay_gets_its_program_and_a_message_in_the_words_of_the_inside(folder):
    far = Far(folder)
    async with far.serving(HELLO_FRAME + frame(DATA, CONTROL, bytes([OUT]) + b"ready\n")) as tasks:
        assert await far.control.wait_until_ready()
        tasks.start_soon(spawn_and_fail, far)
        _, number, token = await far.arrived(OPEN)
        _, _, message = await far.arrived(DATA)
        fields = message[1:].split(b"\0")
        assert fields[1:4] == [b"spawn", token, b"run"]
        assert fields[6:10] == [b"drop", b"--", b"echo", b"x"]
        await far.say(frame(DATA, number, bytes([STATUS]) + b"no\n"))
        assert (await far.arrived(CLOSE))[1] == number
    assert far.data.startswith(PROGRAM + CONTROL_SHELL)
    assert far.link.home == "/home/x"


async def spawn_and_fail(far: Far, *argv: str) -> None:
    with pytest.raises(Exception, match="cannot start a process"):
        await far.control.spawn("run", argv or ["echo", "x"], cwd="/", env={})


async def test_a_program_may_be_given_any_path_of_the_relays_folder(folder):
    far = Far(folder)
    async with far.serving(HELLO_FRAME) as tasks:
        tasks.start_soon(spawn_and_fail, far, "cat", "/tmp/inside/pipes/control.sh", "/tmp/inside/pipes/..", "ü")
        _, number, _ = await far.arrived(OPEN)
        _, _, message = await far.arrived(DATA)
        assert message.split(b"\0")[-5:] == [
            b"cat",
            b"/tmp/inside/pipes/control.sh",
            b"/tmp/inside/pipes/..",
            "ü".encode(),
            b"",
        ]
        await far.say(
            frame(TAKEN, CONTROL, NUMBER.pack(len(message) - 1)) + frame(DATA, number, bytes([STATUS]) + b"no\n")
        )
        assert (await far.arrived(CLOSE))[1] == number
        assert far.link.channels[CONTROL].room == WINDOW


async def test_a_program_whose_caller_left_before_its_start_was_known_is_ended(folder):
    far = Far(folder)
    async with far.serving(HELLO_FRAME):
        async with anyio.create_task_group() as starting:
            starting.start_soon(spawn_and_fail, far)
            _, number, _ = await far.arrived(OPEN)
            starting.cancel_scope.cancel()
        await far.arrived(CLOSE)
        await far.say(frame(DATA, number, bytes([STATUS]) + b"+77\n"))
        _, _, message = await far.arrived(DATA, b"signal")
        assert message == bytes([IN]) + b"3\0signal\x0077\0KILL\0"


@pytest.mark.parametrize(
    "said",
    [
        frame(HELLO, 0, b"{}"),
        frame(ASK, 7, b"true"),
        frame(DATA, CONTROL),
        frame(DATA, CONTROL, bytes([OUT]) + b"x" * READ_SIZE) * 80,
        frame(TAKEN, CONTROL, NUMBER.pack(1)),
        "no base64\n",
        "A" * (1 << 21),
    ],
    ids=["hello", "answer", "empty", "flood", "taken", "text", "line"],
)
async def test_a_relay_that_sends_what_it_may_not_ends_the_link(folder, said):
    far = Far(folder)
    if isinstance(said, bytes):
        await far.say(said)
    else:
        await far.say(HELLO_FRAME)
        await far.link.receive(said)
    with anyio.fail_after(5), pytest.raises(BrokenLinkError):
        await far.link.serve(far.take)
    far.close()


async def test_nobody_inside_calls_an_owner_that_there_is_not(folder):
    far = Far(folder)
    async with far.serving(HELLO_FRAME + frame(CONNECT, INSIDE_FIRST)):
        assert (await far.arrived(CLOSE))[1] == INSIDE_FIRST


async def test_a_question_is_answered_even_if_the_link_ends(folder):
    far = Far(folder)
    async with far.serving():
        answer, lost = far.link.end_processes(), far.link.end_processes()
        _, number, _ = await far.arrived(ASK)
        await far.say(frame(ASK, number, b"true"))
        assert await anyio.to_thread.run_sync(answer.result, 5) is True
    with pytest.raises(SandboxClosedError):
        lost.result(0)
    with pytest.raises(SandboxClosedError):
        far.link.end_processes()


def relay_command(folder: Path, port: int = 0) -> list[str]:
    sizes = str(len(PROGRAM)), str(len(CONTROL_SHELL))
    return [sys.executable, "-I", "-S", "-c", BOOT, *sizes, str(folder / "inside"), str(folder), "root", str(port)]


class Near:
    """A real relay, and a host that speaks frames to it."""

    def __init__(self, tmp_path: Path, port: int = 0) -> None:
        self.inside = tmp_path / "inside"
        limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "limited", *relay_command(tmp_path, port)]
        self.relay = subprocess.Popen(limited, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._found: deque[Frame] = deque()
        self.say(PROGRAM + CONTROL_SHELL)
        while (line := self.relay.stdout.readline()) != f"{MARK}\n".encode():
            assert line
        assert self.hear(DATA)[2] == bytes([OUT]) + b"ready\n"

    def say(self, data: bytes) -> None:
        self.relay.stdin.write(data)

    def hear(self, kind: bytes) -> Frame:
        """Return the next frame of a kind."""
        while True:
            while self._found:
                if (found := self._found.popleft())[0] == kind:
                    return found
            assert select.select([self.relay.stdout], [], [], 10)[0], "the relay says nothing"
            line = self.relay.stdout.readline()
            assert line, "the relay has ended"
            self._found += frames(base64.b64decode(line))


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Callable[..., Near]]:
    made = []

    def make(port: int = 0) -> Near:
        made.append(Near(tmp_path, port))
        return made[-1]

    yield make
    for one in made:
        one.relay.stdin.close()
        try:
            one.relay.wait(10)
        except subprocess.TimeoutExpired:
            one.relay.kill()
        one.relay.stdout.close()
        one.relay.wait()


def test_a_socket_inside_that_nobody_accepts_from_does_not_hold_up_the_relay(near):
    relay = near()
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(relay.inside / "sockets" / "full"))
        listener.listen(0)
        code = 0
        while code == 0:
            client = opened.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            code = client.connect_ex(listener.getsockname())
        relay.say(frame(CONNECT, 5, b"full"))
        assert relay.hear(CLOSE)[1] == 5


def test_many_connections_to_the_owner_wait_for_each_other(near):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    relay = near(port)
    with ExitStack() as opened:
        for _ in range(200):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        for number in range(MOST_CONNECTIONS):
            assert relay.hear(CONNECT)[1] == INSIDE_FIRST + number
        for number in range(200):  # it has had its time to accept the rest, for which it has no descriptors
            relay.say(frame(ASK, number))
            assert relay.hear(ASK)[1] == number
        relay.say(frame(CLOSE, INSIDE_FIRST))
        assert relay.hear(CONNECT)[1] == INSIDE_FIRST + MOST_CONNECTIONS


async def test_a_real_relay_carries_programs_and_leaves_nothing(folder, tmp_path):
    inside = tmp_path / "inside"
    far = Far(folder, str(inside))
    async with await anyio.open_process(relay_command(tmp_path), stderr=None) as relay:

        async def receive() -> None:
            async for data in relay.stdout:
                await far.link.receive(data.decode())

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                tasks.start_soon(far.link.serve, relay.stdin.send)
                assert await far.control.wait_until_ready()
                echo = "cat; echo done >&2; exit 3"
                async with running(far.control, ["bash", "-c", echo], cwd="/", env={}) as program:
                    data = os.urandom(3 * WINDOW)
                    tasks.start_soon(send, program, data)
                    assert await receive_all(program) == data
                    assert await program.wait() == 3
                    assert program.errors() == "done\n"
                async with running(far.control, [sys.executable, "-c", ENLARGE], cwd="/", env={}) as program:
                    assert await receive_all(program) == bytes(MOST_PIPE)
                    assert await program.wait() == 0
                stray = "setsid sleep 1000 & sleep 1000"
                async with running(far.control, ["bash", "-c", stray], cwd="/", env={}) as program:
                    assert await anyio.to_thread.run_sync(far.link.end_processes().result, 10) is True
                    assert await anyio.to_thread.run_sync(far.link.end_processes().result, 10) is False
                    assert await program.wait() == 137
                far.control.close()
                await relay.stdin.aclose()
            assert await relay.wait() == 0
    assert not inside.exists()
    far.close()


async def send(program: RunningProgram, data: bytes) -> None:
    assert await program.send(data)
    program.close_input()


async def receive_all(program: RunningProgram) -> bytes:
    received = b""
    while data := await program.receive():
        received += data
    return received
