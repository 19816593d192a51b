"""One IPython kernel: its process inside, jupyter_client here, and Unix sockets between them.

The kernel binds its sockets in a folder that the sandbox may write to. The host connects to none of these names
directly, since the code inside could put a link to another socket of the host there: it makes hard links in a
folder of its own, checks that they are sockets, and connects to those. Messages are hostile: their size and
number are bounded, and every field is checked before it is used.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import zmq
import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient

from sandboxes.contract import PythonErrorInfo
from sandboxes.control import Child
from sandboxes.errors import SandboxStartError, SessionDiedError
from sandboxes.output import OutputBuffer
from sandboxes.pipes import ERROR, INPUT, OUTPUT, Reader

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
"""Jupyter's, in the order of our port numbers, from 1."""
HOST_CHANNELS = ("shell", "iopub")
"""Those that the host uses: signals do for the rest."""

SETUP = Path(__file__).with_name("kernel_setup.py")
MESSAGE_LIMIT = 4 * 1024 * 1024
QUEUE_LIMIT = 64
LOG_LIMIT = 4096
POLL = 0.02
PROBE = 1.0
SILENCE = 4.0
"""How long the output may pause after the reply: "idle" is lost only where the kernel's queue ran over."""

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def make_context() -> zmq.asyncio.Context:
    """The one ZeroMQ context of a provider, with bounds on what any kernel may make the host hold."""
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
    context.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    context.setsockopt(zmq.LINGER, 0)
    return context


def connection_info(prefix: str) -> dict[str, object]:
    """Jupyter's connection file for Unix sockets PREFIX-1 to PREFIX-5.

    Without a key: who can reach the sockets could read it too, so it would guard nothing.
    """
    ports = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, 1)}
    return {"transport": "ipc", "ip": prefix, "key": "", "signature_scheme": "hmac-sha256", **ports}


@dataclass(frozen=True, slots=True)
class KernelPaths:
    """Where the kernel's files are, as seen from inside and from the host."""

    sockets_inside: str
    sockets: Path
    """The same folder; code inside may write to it."""
    links: Path
    """A folder of the host alone."""
    files_inside: str
    files: Path
    """The same folder; only the host may write to it."""


class Cell:
    """What the messages of one cell add up to."""

    def __init__(self, limit: int) -> None:
        self.output = OutputBuffer(limit)
        self.result: str | None = None
        self.error: PythonErrorInfo | None = None
        self.truncated = False
        """Whether the result or the error was cut; the output says so itself."""
        self.idle = anyio.Event()
        self.taken = 0
        """Messages so far."""
        self._limit = limit

    def take(self, kind: str, content: Mapping[str, Any]) -> None:
        """Add one message of the output channel."""
        self.taken += 1
        if kind == "stream":
            self.output.add(_encoded(content.get("text")))
        elif kind == "display_data":
            self.output.add(_encoded(_plain(content)) + b"\n")
        elif kind == "execute_result":
            self.result = self._cut(_plain(content))
        elif kind == "error":
            self.error = PythonErrorInfo(
                ename=self._cut(content.get("ename")),
                evalue=self._cut(content.get("evalue")),
                traceback=self._cut(_joined(content.get("traceback"))),
            )
        elif kind == "status" and content.get("execution_state") == "idle":
            self.idle.set()

    def _cut(self, text: object) -> str:
        buffer = OutputBuffer(self._limit)
        buffer.add(_encoded(text))
        self.truncated = self.truncated or buffer.truncated
        return ANSI.sub("", buffer.text())


class Kernel:
    """One kernel process and the client that is connected to it."""

    def __init__(self, child: Child, context: zmq.asyncio.Context, paths: KernelPaths, token: str) -> None:
        self.child = child
        self.ready = False
        self._paths = paths
        self._token = token
        self._log = OutputBuffer(LOG_LIMIT)
        child.pipes.close(INPUT)
        self._readers = [Reader(child.pipes.fds[name]) for name in (OUTPUT, ERROR)]
        for reader in self._readers:
            reader.start(self._log.add)
        self._client = AsyncKernelClient(context=context)

    def said(self) -> str:
        """For an error message: what the process printed by itself."""
        return f"it said: {self._log.text().strip() or 'nothing'}"

    async def connect(self) -> None:
        """Wait for the sockets, connect, and make sure that messages come through both.

        Raises:
            SandboxStartError: the process ended.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_at_end, tasks.cancel_scope)
            await self._link()
            self._start_client()
            while not self.ready:
                self.ready = await self._probe()
            tasks.cancel_scope.cancel()
        if not self.ready:
            for reader in self._readers:
                reader.stop()
            raise SandboxStartError(
                f"the Python kernel ended while it started; {self.said()}",
                hint="the image needs python3 with ipykernel for the Python tool",
            )

    async def _cancel_at_end(self, scope: anyio.CancelScope) -> None:
        await self.child.exit_code()
        scope.cancel()

    async def _link(self) -> None:
        for channel in HOST_CHANNELS:
            name = f"{self._token}-{CHANNELS.index(channel) + 1}"
            while not _link_socket(self._paths.sockets / name, self._paths.links / name):  # noqa: ASYNC110
                await anyio.sleep(POLL)  # the kernel tells nobody when it has bound them

    def _start_client(self) -> None:
        info = connection_info(f"{self._paths.links}/{self._token}")
        self._client.load_connection_info(info)  # type: ignore[arg-type]
        self._client.start_channels(  # noqa: S604  "shell" is a channel of the kernel
            shell=True,
            iopub=True,
            stdin=False,
            hb=False,
            control=False,
        )

    async def _probe(self) -> bool:
        """Prepare the kernel; False where the output channel was not connected in time to see it."""
        request = self._client.execute(SETUP.read_text(), silent=True, store_history=False)
        cell = Cell(LOG_LIMIT)
        with anyio.move_on_after(PROBE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._collect, request, cell)
                await cell.idle.wait()
                await self._reply(request)
                tasks.cancel_scope.cancel()
            return True
        return False

    def request(self, code: str) -> str:
        """Send a cell; the id of its message."""
        return str(self._client.execute(code, allow_stdin=False))

    async def follow(self, request: str, cell: Cell) -> None:
        """Collect the messages of a request until it is done.

        Raises:
            SessionDiedError: the kernel ended.
        """
        done = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._collect, request, cell)
            tasks.start_soon(self._cancel_at_end, tasks.cancel_scope)
            await self._reply(request)
            await self._until_idle(cell)
            done = True
            tasks.cancel_scope.cancel()
        if not done:
            raise SessionDiedError("the Python kernel ended while the cell ran")
        if not cell.idle.is_set():
            # ZeroMQ disconnects for good from a peer that sends more than it may.
            raise SessionDiedError("the kernel's output was lost: it sent too much at once")

    async def _until_idle(self, cell: Cell) -> None:
        """Wait for the rest of the output, which comes on a channel of its own, for as long as it keeps coming."""
        seen = -1
        while not cell.idle.is_set() and cell.taken != seen:
            seen = cell.taken
            with anyio.move_on_after(SILENCE):
                await cell.idle.wait()

    async def _collect(self, request: str, cell: Cell) -> None:
        while not cell.idle.is_set():
            message = await self._receive(self._client.get_iopub_msg)
            if message is not None and _parent(message) == request:
                cell.take(str(message.get("msg_type")), _mapping(message.get("content")))

    async def _reply(self, request: str) -> None:
        while True:
            message = await self._receive(self._client.get_shell_msg)
            if message is not None and _parent(message) == request:
                return

    async def _receive(self, get: Any) -> Mapping[str, Any] | None:
        """The next message, or None for one that is not well formed."""
        await anyio.lowlevel.checkpoint()  # a flood must leave the event loop to others
        try:
            return _mapping(await get(timeout=None))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None

    def close(self) -> None:
        """Kill the process, disconnect and remove the links. Idempotent."""
        for reader in self._readers:
            reader.close()
        self._client.stop_channels()
        self.child.discard()
        for path in self._paths.links.glob(f"{self._token}-*"):
            path.unlink()


def _link_socket(source: Path, link: Path) -> bool:
    """Make the hard link; False where there is no socket yet, or something that is none."""
    try:
        os.link(source, link, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if stat.S_ISSOCK(link.lstat().st_mode):
        return True
    link.unlink()
    return False


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parent(message: Mapping[str, Any]) -> object:
    return _mapping(message.get("parent_header")).get("msg_id")


def _plain(content: Mapping[str, Any]) -> object:
    return _mapping(content.get("data")).get("text/plain")


def _joined(lines: object) -> str:
    return "\n".join(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else ""


def _encoded(text: object) -> bytes:
    return text.encode("utf-8", "replace") if isinstance(text, str) else b""
