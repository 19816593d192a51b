"""Interrupts are taken in order, and messages of kernels and reports are untrusted."""

import functools
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.contract import SessionOutput
from sandboxes.errors import SessionDiedError
from sandboxes.runtime.control import Child, ControlShell
from sandboxes.runtime.pipes import Pipes
from sandboxes.sessions.bash import REPORT, Interrupter, InterruptTiming
from sandboxes.sessions.kernel import DELIM, MAX_FORMATS, Cell, Wire, _open_socket, decode, make_session
from sandboxes.sessions.serial_session import LEFT_OUT, OutputFeed
from sandboxes.sessions.zmtp import GREETING, MESSAGE_LIMIT, ZmtpConnection, encode_frame

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


async def test_a_report_counts_with_its_nonce_and_the_jobs_of_the_one_before_are_spared(bench):
    command = bench.interrupter.begin()
    bench.report("17", "other 5", "23", f"{command.nonce} x", "99999999999", "no job")
    with pytest.raises(TimeoutError):
        await bench.interrupter.read_report(command.nonce, anyio.current_time() + 0.02)
    assert await bench.interrupter.interrupt(command, anyio.current_time() + 60) is None
    [stop, *_] = bench.messages()
    assert stop == ["stop", "42", "INT", str(command.since), "1", "17", "23"]
    bench.report(f"{command.nonce} 130")
    assert await bench.interrupter.end_overdue(command) == 130


async def test_a_time_out_goes_through_its_steps_and_nudges_the_shell_in_between(bench):
    command = bench.interrupter.begin()
    assert await bench.interrupter.end_overdue(command) is None
    messages = bench.messages()
    stops = [(message[2], message[4]) for message in messages if message[0] == "stop"]
    assert stops == [("INT", "1"), ("TERM", "7"), ("KILL", "7")]
    assert ["interrupt", "42"] in messages
    assert bench.questions() > 0


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


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("answers", "settled"),
        ("is silent", "the shell did not settle after it was interrupted"),
        ("ends", "the shell ended while the command ran"),
    ],
)
async def test_a_shell_has_settled_only_if_it_answers(bench, ends, said):
    ended = []

    async def settle() -> None:
        try:
            await bench.interrupter.settle()
            ended.append("settled")
        except SessionDiedError as error:
            ended.append(str(error))

    if ends == "ends":
        bench.end_shell()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settle)
        await anyio.wait_all_tasks_blocked()
        [[_, token]] = bench.messages()
        bench._theirs.send(f"{token}\n".encode())  # the control shell's answer
        while ends == "answers" and not ended:
            await anyio.sleep(0.001)
            with suppress(BlockingIOError):
                bench.answer()
    assert ended == [said]
    assert bench.questions() == {"answers": 0, "is silent": SHORT.questions, "ends": 1}[ends]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["text", "data", "ename", "evalue", "traceback", "execution_state", "text/plain"])


@given(
    st.sampled_from(["stream", "display_data", "execute_result", "error", "status", "other"]),
    st.dictionaries(FIELDS, JSON, max_size=5),
)
def test_any_message_is_survived(kind, content):
    seen: list[SessionOutput] = []
    cell = Cell(100, OutputFeed(seen.append, 100))
    cell.add_message(kind, content)
    assert isinstance(cell.output.text(), str)
    assert cell.result is None or isinstance(cell.result, str)
    assert all(isinstance(text, str) for one in seen for text in one.formats.values())


def test_formats_that_cannot_be_sent_on_are_left_out():
    seen: list[SessionOutput] = []
    cell, deep = Cell(100, OutputFeed(seen.append, 1_000)), functools.reduce(lambda inner, _: [inner], range(900), 1)
    found = {"a/json": deep, "b+json": 10**40, "c/json": "\ud800", "d/json": "text", "text/html": "\ud800", "e": [1]}
    cell.add_message("display_data", {"data": found | {"f\ud800": "g"}})
    assert [dict(one.formats) for one in seen] == [{"d/json": '"text"', "text/html": "?", "f?": "g"}]
    cell.add_message("display_data", {"data": {str(number): "" for number in range(999)}})
    assert len(seen[-1].formats) == MAX_FORMATS
    for _ in range(2):
        cell.add_message("execute_result", {"data": {"image/png": "x" * 1_000}})
    assert [one.formats["text/plain"] for one in seen[2:]] == [LEFT_OUT]


def test_colors_are_removed_and_long_values_cut():
    cell = Cell(100)
    cell.add_message("error", {"ename": "E", "evalue": "v" * 1000, "traceback": ["\x1b[31mred\x1b[0m", "end"]})
    assert cell.error.traceback == "red\nend"
    assert "left out" in cell.error.evalue
    assert cell.truncated


def test_only_sockets_are_opened_and_no_link_is_followed(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    target = tmp_path / "host.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(target))
        server.listen()
        (inside / "planted").symlink_to(target)
        (inside / "file").touch()
        os.mkfifo(inside / "fifo")
        for name in ("planted", "missing", "file", "fifo"):
            assert _open_socket(inside / name) is None
        os.link(target, inside / "real")
        held = _open_socket(inside / "real")
        assert held is not None
        (inside / "real").unlink()
        (inside / "real").symlink_to("/dev/null")
        client.connect(f"/proc/self/fd/{held}")  # the checked socket, whatever has its name by now
        os.close(held)


def frames(kind: str, content: object, parent: object = None) -> list[bytes]:
    parts = ({"msg_id": "answer", "msg_type": kind, "version": "5.3"}, parent or {"msg_id": "request"}, {}, content)
    return [b"topic", DELIM, b"", *(json.dumps(part).encode() for part in parts)]


@pytest.mark.parametrize("parent", [{"msg_id": "another"}, ["request"], "request", 7])
def test_an_answer_to_another_request_is_dropped(parent):
    assert decode(frames("stream", {}, parent), "request") is None


def test_invalid_utf8_and_json_are_survived():
    message = frames("stream", {})
    message[-1] = b'{"text": "\xff", "number": NaN}'
    found = decode(message, "request")
    assert found[1]["text"] == "\ufffd"


@given(st.lists(st.binary(max_size=8) | st.just(DELIM) | st.just(b"{}"), max_size=8))
def test_any_frames_are_survived(message):
    assert decode(message, "request") is None


PARTS = {"lists": b"[" * 100_000, "objects": b'{"a":' * 100_000, "list": b"[]", "null": b"null", "nothing": b""}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_any_part_is_survived(part):
    for place in (-4, -3, -1):
        message = frames("stream", {})
        message[place] = part
        found = decode(message, "request")
        assert found is None or found[1] == {} or place == -4


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k")


async def test_a_request_and_a_flood_of_answers(folder):
    """Any text is sent. Everything arrives in order, nothing before `listen` and nothing after `stop`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as shell, context.socket(zmq.XPUB) as iopub:
            iopub.setsockopt(zmq.SNDHWM, 0)
            shell.bind(f"ipc://{folder}/shell")
            iopub.bind(f"ipc://{folder}/iopub")
            wire = Wire(folder / "shell", folder / "iopub", make_session())
            with anyio.fail_after(20):
                for code in ("'\ud800'", "print('ä')", "a\0b", "1 + 1"):
                    request = wire.execute(code)
                    _, _, _, header, _, _, content = await anyio.to_thread.run_sync(shell.recv_multipart)
                    assert (json.loads(header)["msg_id"], json.loads(content)["code"]) == (request, code)
                await anyio.to_thread.run_sync(iopub.recv)  # the subscription
                seen: list[str] = []
                done = anyio.Event()

                def take(kind: str, content: dict[str, object]) -> None:
                    seen.append(str(content["text"])[:8])
                    if len(seen) == 500:
                        done.set()

                wire.listen(request, take)  # type: ignore[arg-type]
                for number in range(500):
                    text = f"{number:08}" + "x" * 10_000
                    iopub.send_multipart(frames("stream", {"text": text}, {"msg_id": request}))
                await done.wait()
                wire.stop()
                iopub.send_multipart(frames("stream", {"text": "late"}, {"msg_id": request}))
                await anyio.sleep(0.05)
            assert seen == [f"{number:08}" for number in range(500)]
            wire.close()
            wire.close()
    finally:
        context.destroy(linger=0)


async def test_a_kernel_that_reads_nothing_cannot_hold_a_caller(folder):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "shell"))
        server.listen()
        wire = Wire(folder / "shell", folder / "iopub", make_session())

        def flood() -> None:
            for _ in range(100_000):
                wire.execute("1")

        with pytest.raises(BlockingIOError):
            flood()
        wire.close()


@asynccontextmanager
async def raw_peer(path: Path) -> AsyncIterator[tuple[ZmtpConnection, socket.socket]]:
    """Yield a connection and its peer, which is ready."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        connection = ZmtpConnection(path, b"DEALER")
        peer, _ = server.accept()
    with peer:
        peer.setblocking(False)
        peer.send(GREETING + encode_frame(b"\x05READY", 4))
        try:
            yield connection, peer
        finally:
            connection.close()


@pytest.mark.parametrize("frame", [bytes(256 * 1024), b""], ids=["large", "empty"])
async def test_a_message_without_an_end_disconnects_its_sender(folder, frame):
    async with raw_peer(folder / "shell") as (connection, peer):
        taken: list[object] = []
        connection.start(taken.append)
        data = encode_frame(frame, 1)
        left, sent = data, 0
        with anyio.fail_after(20), suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2 * MESSAGE_LIMIT:
                with suppress(BlockingIOError):
                    count = peer.send(left)
                    left, sent = left[count:] or data, sent + count
                await anyio.lowlevel.checkpoint()
        assert sent < 2 * MESSAGE_LIMIT
        assert taken == []
        with pytest.raises(BlockingIOError):
            connection.send([b"more"])


async def test_nothing_is_read_while_nobody_listens(folder):
    async with raw_peer(folder / "shell") as (connection, peer):
        data, sent = encode_frame(bytes(64 * 1024)), 0
        for _ in range(1000):
            with suppress(BlockingIOError):
                sent += peer.send(data)
            await anyio.lowlevel.checkpoint()
        assert sent < MESSAGE_LIMIT
        seen = anyio.Event()
        connection.start(lambda _: seen.set())
        with anyio.fail_after(20):
            await seen.wait()


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n" * 10, GREETING + encode_frame(b"early")])
async def test_a_peer_that_speaks_another_protocol_is_disconnected(folder, said):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "other"))
        server.listen()
        connection = ZmtpConnection(folder / "other", b"SUB")
        peer, _ = server.accept()
        with peer:
            peer.send(said)
            with anyio.fail_after(20):
                while True:
                    try:
                        connection.send([b"more"])
                    except BlockingIOError:
                        break
                    await anyio.lowlevel.checkpoint()
        connection.close()
