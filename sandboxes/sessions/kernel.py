"""One IPython kernel: its process inside, and Jupyter's messages on the Unix sockets between it and the host.

The kernel binds its sockets in a folder that the sandbox can write to. Code inside could replace one by a link to
another socket of the host, so the host opens each without following links, checks that it is a socket, and connects to
the open handle. The size and number of messages are bounded (see `zmtp`), and every field is checked before use.

jupyter_client's `Session` writes messages; what it does to read one has no bounds. A message for another request is
dropped before it is decoded, and malformed ones are dropped. Messages are not signed.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import orjson

from sandboxes.contract import PythonErrorInfo
from sandboxes.errors import SandboxStartError, SessionDiedError
from sandboxes.runtime.control import Child
from sandboxes.runtime.pipes import ERROR, INPUT, OUTPUT, OutputBuffer, Reader
from sandboxes.sessions.serial_session import OutputFeed
from sandboxes.sessions.zmtp import ZmtpConnection

if TYPE_CHECKING:
    from jupyter_client.session import Session

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
"""In the order of our port numbers, which begin at 1."""
HOST_CHANNELS = ("shell", "iopub")

PROGRAM = Path(__file__).with_name("kernel_program.py")
READY = b"ready"
"""Printed by the program once its sockets exist."""
LOG_LIMIT = 4096
PLAIN = "text/plain"
POLL = 0.02
PROBE = 0.5
SILENCE = 4.0
"""Longest pause of output after the reply. Only code that changes how the kernel sends can lose "idle"."""
MAX_FORMATS = 32
"""The most formats of one value. Jupyter defines about a dozen."""

DELIM = b"<IDS|MSG>"
HEADERS_LIMIT = 16 * 1024
"""Kernels send some hundred bytes."""
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)

Sink = Callable[[str, Mapping[str, Any]], None]
"""Gets the type and the content of each message."""

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def make_connection_info(prefix: str) -> dict[str, object]:
    """Return Jupyter's connection file for the Unix sockets PREFIX-1 to PREFIX-5.

    It has no key: anyone who can reach the sockets could read the key too.
    """
    ports = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, 1)}
    return {"transport": "ipc", "ip": prefix, "key": "", "signature_scheme": "hmac-sha256", **ports}


@dataclass(frozen=True, slots=True)
class KernelPaths:
    sockets_inside: str
    sockets: Path
    """On the host; code inside can write to it."""
    files_inside: str
    files: Path
    """On the host, which alone can write to it."""


class Wire:
    def __init__(self, shell: Path, iopub: Path, session: "Session") -> None:
        """Connect without waiting."""
        self._session = session
        self._shell = ZmtpConnection(shell, b"DEALER")
        self._connections = (self._shell, ZmtpConnection(iopub, b"SUB"))

    def execute(self, code: str, *, silent: bool = False, **asked: Any) -> str:
        """Return the id of the message. `kernel_program` reads what else was `asked`.

        Raises:
            BlockingIOError: The kernel takes no more requests.
        """
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
            **asked,
        }
        message = self._session.msg("execute_request")
        # ASCII can encode any Python string, including half of a surrogate pair.
        message["content"] = json.dumps(content).encode()
        frames = self._session.serialize(message)
        try:
            self._shell.send(frames)
        except BlockingIOError as error:
            raise BlockingIOError("the kernel takes no more requests") from error
        return str(message["msg_id"])

    def listen(self, request: str, sink: Sink) -> None:
        def take(frames: Sequence[bytes]) -> None:
            message = decode(frames, request)
            if message is not None:
                sink(*message)

        for connection in self._connections:
            connection.start(take)

    def stop(self) -> None:
        """Stop reading. Further messages stay where they are; their sender has to wait. Idempotent."""
        for connection in self._connections:
            connection.stop()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        for connection in self._connections:
            connection.close()


class Cell:
    def __init__(self, limit: int, feed: OutputFeed | None = None) -> None:
        self.output = OutputBuffer(limit)
        self.feed = feed or OutputFeed(None, limit)
        self.result: str | None = None
        self.error: PythonErrorInfo | None = None
        self.truncated = False
        """The result or the error was cut; `output` knows whether it was."""
        self.replied = anyio.Event()
        self.idle = anyio.Event()
        self.ending = anyio.Event()
        """Set with the first of both."""
        self.taken = 0
        self._limit = limit

    def add_message(self, kind: str, content: Mapping[str, Any]) -> None:
        self.taken += 1
        if kind == "execute_reply":
            if content.get("status") == "error" and self.error is None:  # IPython failed to print its traceback
                self.error = PythonErrorInfo(self._cut(content.get("ename")), self._cut(content.get("evalue")), "")
            self.replied.set()
            self.ending.set()
        elif kind == "stream":
            self.output.add(data := _encode(content.get("text")))
            self.feed.add("stderr" if content.get("name") == "stderr" else "stdout", {PLAIN: data.decode()})
        elif kind == "display_data":
            self.output.add(_encode(_plain_text(content)) + b"\n")
            self.feed.add("display", _formats(content))
        elif kind == "execute_result":
            self.result = self._cut(_plain_text(content))
            self.feed.add("result", {**_formats(content), PLAIN: self.result})
        elif kind == "error":
            self.error = PythonErrorInfo(
                ename=self._cut(content.get("ename")),
                evalue=self._cut(content.get("evalue")),
                traceback=self._cut(_join_lines(content.get("traceback"))),
            )
        elif kind == "status" and content.get("execution_state") == "idle":
            self.idle.set()
            self.ending.set()

    def _cut(self, text: object) -> str:
        buffer = OutputBuffer(self._limit)
        buffer.add(_encode(text))
        self.truncated = self.truncated or buffer.truncated
        return ANSI.sub("", buffer.text())


class Kernel:
    def __init__(self, child: Child, paths: KernelPaths, token: str) -> None:
        self.child = child
        self.ready = False
        self._paths = paths
        self._token = token
        self._log = OutputBuffer(LOG_LIMIT)
        self._announced = anyio.Event()
        child.pipes.close(INPUT)
        self._readers = [Reader(child.pipes.fds[name]) for name in (OUTPUT, ERROR)]
        for reader in self._readers:
            reader.start(self._add_log)
        self._wire: Wire | None = None
        self._held: list[int] = []

    def _add_log(self, data: bytes) -> None:
        self._log.add(data)
        if READY in data:
            self._announced.set()

    def log_tail(self) -> str:
        return f"its output: {self._log.text().strip() or 'none'}"

    async def connect(self) -> None:
        """Wait for the sockets, connect, and check that messages pass through both.

        Raises:
            SandboxStartError: The process ended.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_at_end, tasks.cancel_scope)
            session = await anyio.to_thread.run_sync(make_session)
            await self._announced.wait()
            for channel in HOST_CHANNELS:
                await self._hold(channel)
            shell, iopub = (Path(f"/proc/self/fd/{held}") for held in self._held)
            self._wire = Wire(shell, iopub, session)
            while not self.ready:
                self.ready = await self._probe(self._wire)
            tasks.cancel_scope.cancel()
        if not self.ready:
            for reader in self._readers:
                reader.stop()
            raise SandboxStartError(
                f"the Python kernel exited during its start; {self.log_tail()}",
                hint='set sandbox.python to "toolkit", for which `rollout-service image build base` makes the Python '
                "once, or use an image that has python3 with ipykernel 6.29 to 7",
            )

    async def _cancel_at_end(self, scope: anyio.CancelScope) -> None:
        await self.child.wait_for_exit()
        scope.cancel()

    async def _hold(self, channel: str) -> None:
        """Wait for the socket if something inside announced it too early."""
        path = self._paths.sockets / f"{self._token}-{CHANNELS.index(channel) + 1}"
        while (held := _open_socket(path)) is None:  # noqa: ASYNC110  there is no event to wait for
            await anyio.sleep(POLL)
        self._held.append(held)

    async def _probe(self, wire: Wire) -> bool:
        """Run an empty cell; return False if the output channel was not connected in time."""
        cell = Cell(LOG_LIMIT)
        try:
            with anyio.move_on_after(PROBE):
                wire.listen(wire.execute("", silent=True), cell.add_message)
                await cell.replied.wait()
                await cell.idle.wait()
            return cell.idle.is_set()
        except BlockingIOError:  # the announced sockets are not a kernel's
            await anyio.sleep(PROBE)
            return False
        finally:
            wire.stop()

    def send_cell(self, code: str, **asked: Any) -> str:
        """Return the id of the message; see `Wire.execute`.

        Raises:
            SessionDiedError: The cell cannot be sent.
        """
        try:
            return self._require_wire().execute(code, **asked)
        except BlockingIOError as error:
            raise SessionDiedError(str(error)) from error

    def _require_wire(self) -> Wire:
        if self._wire is None:
            raise SessionDiedError("the Python kernel is not connected")
        return self._wire

    async def collect(self, request: str, cell: Cell) -> None:
        """
        Raises:
            SessionDiedError: The kernel ended.
        """
        done, wire = False, self._require_wire()
        wire.listen(request, cell.add_message)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_at_end, tasks.cancel_scope)
                await cell.ending.wait()
                with anyio.move_on_after(SILENCE):
                    await cell.replied.wait()
                if not cell.replied.is_set() and cell.error is None:  # an interrupt came before or after its code
                    cell.error = PythonErrorInfo("KeyboardInterrupt", "", "KeyboardInterrupt outside of the code")
                await self._wait_until_idle(cell)
                done = True
                tasks.cancel_scope.cancel()
        finally:
            wire.stop()
        if not done:
            raise SessionDiedError("the Python kernel ended while the cell ran")
        if not cell.idle.is_set():
            # A peer that sends more than it may is disconnected for good.
            raise SessionDiedError("the Python kernel sent too much at once, and its output was lost")

    async def _wait_until_idle(self, cell: Cell) -> None:
        """Wait for the rest of the output, which has its own channel, while it keeps coming."""
        seen = -1
        while not cell.idle.is_set() and cell.taken != seen:
            seen = cell.taken
            with anyio.move_on_after(SILENCE):
                await cell.idle.wait()

    @property
    def has_ended(self) -> bool:
        return self.child.has_ended

    def discard(self) -> None:
        """Idempotent."""
        for reader in self._readers:
            reader.close()
        if self._wire is not None:
            self._wire.close()
        self.child.discard()
        while self._held:
            os.close(self._held.pop())


def _open_socket(path: Path) -> int | None:
    """Open a handle on a socket itself, not on a link's target; return None if it cannot be reached yet."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # code inside may have shut the folder
        return None
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _plain_text(content: Mapping[str, Any]) -> object:
    return as_mapping(content.get("data")).get(PLAIN)


def _formats(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a value by MIME types; JSON becomes its text."""
    found = {}
    for name, value in islice(as_mapping(content.get("data")).items(), MAX_FORMATS):
        text = value
        if name.endswith("json"):
            try:
                text = orjson.dumps(value).decode()
            except TypeError:  # too deep, too large a number, or not a character
                continue
        if isinstance(text, str):
            found[_encode(name).decode()] = _encode(text).decode()
    return found


def _join_lines(lines: object) -> str:
    return "\n".join(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else ""


def _encode(text: object) -> bytes:
    return text.encode("utf-8", "replace") if isinstance(text, str) else b""


def make_session() -> "Session":
    """Return a session without signatures.

    Call this in a thread: the first call imports jupyter_client, which takes too long for the event loop.
    """
    from jupyter_client.session import Session

    session = Session(username="", packer="orjson", unpacker="orjson")
    session.key = b""  # passed to the constructor, it would cause a warning for every kernel
    return session


def decode(frames: Sequence[bytes], request: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type and content, or None if the message answers another request or is malformed."""
    try:
        begin = frames.index(DELIM) + 2  # after the signature
        header, parent, _, content = frames[begin : begin + 4]
        if request.encode() not in parent or len(header) + len(parent) > HEADERS_LIMIT:
            return None
        if orjson.loads(parent)["msg_id"] != request:
            return None
        return str(orjson.loads(header)["msg_type"]), as_mapping(_decode_json(content))
    except MALFORMED:
        return None


def as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _decode_json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except ValueError:  # numbers and characters that Python's own encoder allows
        return json.loads(data.decode("utf-8", "replace"))
