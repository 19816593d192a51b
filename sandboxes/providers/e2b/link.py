"""The host's side of a relay: it joins a sandbox's pipes and sockets on this host with those inside.

To everything above, the sandbox looks like one on this host, with a socket of its control shell, named pipes of its
programs, and a folder with its kernels' sockets. `relay_program` describes what passes between.

A link is a thread, so that floods of a sandbox take no time of the service's event loop. Whatever arrives is untrusted:
what is no frame, or more than a channel may send ahead, ends the sandbox.
"""

import base64
import json
import math
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread

from sandboxes.errors import SandboxClosedError
from sandboxes.providers.e2b import relay_program as relay
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.runtime.control import SCRIPT, ticks_now
from sandboxes.sessions.kernel import CHANNELS, HOST_CHANNELS
from sandboxes.task_groups import open_task_group

PROGRAM, CONTROL_SHELL = Path(relay.__file__).read_bytes(), SCRIPT.read_bytes()
PIECE = 256 * 1024
MOST_WAITING = 4 * 1024 * 1024
"""No more is taken while so much waits for the thread."""
WAIT_SECONDS = 0.01
MOST_INCOMPLETE = 1024 * 1024
"""Bounds a line or a frame."""
TRUSTED = "trusted"
"""A program of this mode keeps the relay's rights."""
MOST_AHEAD = relay.WINDOW + 8 * relay.READ_SIZE
"""How much of a channel may wait here, besides what a program's pipes had before its status."""
LATE_START = bytes([relay.STATUS]) + b"+"
WATCH_SECONDS = 5.0
"""Between two looks of the thread at whether the process is about to exit."""
ENV_AT = 5


class BrokenLinkError(Exception):
    pass


class Link(relay.Carrier):
    def __init__(self, folder: RunFolder, channel: socket.socket, inside: str) -> None:
        """`channel` is the end of the socket pair that a control shell would read from; owned from here on. `inside` is
        the relay's folder.
        """
        super().__init__()
        channel.setblocking(False)
        self.outgoing += PROGRAM + CONTROL_SHELL
        self.home = "/"
        self.owner = 0
        """The owner's port on this host; 0 if there is none."""
        self._control = channel
        self._folder = folder
        self._inside = inside
        self._numbers = iter(range(relay.CONTROL + 1, relay.INSIDE_FIRST))
        self._listeners: dict[int, list[socket.socket]] = {}
        self._questions: dict[int, Future[bool]] = {}
        self._messages = b""
        self._line = ""
        self._is_marked = False
        self._prefix: list[str] = []
        self._shift = 0
        """Ticks by which the clock inside is ahead."""
        self._arrived: deque[Callable[[], None]] = deque()
        self._given = self._taken = 0
        """Characters of the relay's output: each number is of one thread."""
        self._ends = False
        self._woken, self._wake = os.pipe2(relay.FLAGS)
        self._lock = threading.Lock()

    # In the event loop of the client.

    async def serve(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Carry until the control shell's user has left. `send` writes to the relay.

        Raises:
            BrokenLinkError: The relay sent what it may not send.
        """
        control = os.dup(self._control.fileno())
        self.channels[relay.CONTROL] = relay.LinkChannel(relay.CONTROL, {}, {relay.OUT: control}, [])
        pieces: deque[bytes] = deque()
        more = anyio.Event()

        async def send_all() -> None:
            nonlocal more
            while True:
                await more.wait()
                more = anyio.Event()
                while pieces:
                    data = b"".join(pieces)
                    pieces.clear()
                    for at in range(0, len(data), PIECE):
                        await send(data[at : at + PIECE])

        def put(data: bytes) -> None:
            pieces.append(data)
            more.set()

        async def end_with_block() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                self._ends = True
                self._call(lambda: None)

        async with open_task_group() as tasks:
            tasks.start_soon(send_all)
            tasks.start_soon(end_with_block)
            await anyio.to_thread.run_sync(self._run, put, limiter=anyio.CapacityLimiter(math.inf))
            tasks.cancel_scope.cancel()

    async def receive(self, text: str) -> None:
        """Pass on the relay's output as fast as the thread takes it."""
        while self._given - self._taken > MOST_WAITING:  # noqa: ASYNC110  a thread takes it
            await anyio.sleep(WAIT_SECONDS)
        self._given += len(text)
        self._call(partial(self._take_text, text))

    @property
    def is_left(self) -> bool:
        """The control shell's user has closed its end."""
        with suppress(BlockingIOError):
            return self._control.recv(1, socket.MSG_PEEK) == b""
        return False

    def close(self) -> None:
        """Call it once the thread has ended. The end of the socket ends everything for its user."""
        self._ends = True
        self._control.close()
        for channel in list(self.channels.values()):
            self.close_channel(channel)
        with self._lock:
            os.close(self._woken)
            os.close(self._wake)
            self._wake = -1
        for answer in list(self._questions.values()):
            with suppress(InvalidStateError):
                answer.set_exception(SandboxClosedError("the sandbox has ended"))

    # Anywhere.

    def end_processes(self) -> "Future[bool]":
        """End all processes inside; the result is whether there were any.

        Raises:
            SandboxClosedError: The link has ended.
        """
        number, answer = next(self._numbers), Future[bool]()
        self._questions[number] = answer
        self._call(partial(self.send, relay.ASK, number))
        if self._ends:
            raise SandboxClosedError("the sandbox has ended")
        return answer

    def _call(self, action: Callable[[], None]) -> None:
        self._arrived.append(action)
        with self._lock, suppress(BlockingIOError):
            if self._wake >= 0:
                os.write(self._wake, b"\0")

    # In the thread.

    def _run(self, put: Callable[[bytes], None]) -> None:
        try:
            while not self._ends and relay.CONTROL in self.channels and threading.main_thread().is_alive():
                if self.outgoing:
                    anyio.from_thread.run_sync(put, bytes(self.outgoing))
                    self.outgoing.clear()
                handles: dict[int, Callable[[int], object]] = {self._woken: self._take_calls}
                if self.channels[relay.CONTROL].room > 0:
                    handles[self._control.fileno()] = self._read_control
                for listener in (one for some in self._listeners.values() for one in some):
                    handles[listener.fileno()] = partial(self._accept, listener)
                self.wait(handles, WATCH_SECONDS)
        except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
            raise BrokenLinkError(f"the relay sent what it may not send: {error}") from error
        finally:
            self._ends = True

    def _take_calls(self, _: int) -> None:
        os.read(self._woken, relay.READ_SIZE)
        while self._arrived:
            self._arrived.popleft()()

    def _take_text(self, text: str) -> None:
        self._taken += len(text)
        *lines, self._line = (self._line + text).split("\n")
        if not self._is_marked and relay.MARK in lines:
            del lines[: lines.index(relay.MARK) + 1]
            self._is_marked = True
        for line in lines if self._is_marked else ():
            self.feed(base64.b64decode(line, validate=True))
        if len(self._line) > MOST_INCOMPLETE or len(self.incoming) > MOST_INCOMPLETE:
            raise ValueError("a line or a frame that is too long")

    def obey(self, kind: bytes, number: int, content: bytes) -> None:
        if kind == relay.HELLO:
            hello = json.loads(content)
            self._prefix, self.home = list(map(str, hello["prefix"])), str(hello["home"])
            self._shift = int(hello["ticks"]) - ticks_now()
        elif kind == relay.ASK:
            with suppress(InvalidStateError):  # nobody waits for it any more
                self._questions.pop(number).set_result(bool(json.loads(content)))
        elif kind == relay.CONNECT:
            self._call_owner(number)
        else:
            super().obey(kind, number, content)
            channel = self.channels.get(number)
            if channel is None:
                self._end_late_start(kind, content)
                return
            most = MOST_AHEAD + 2 * relay.MOST_PIPE * channel.is_program
            if max(channel.ahead, len(channel.pending)) > most or channel.room > relay.WINDOW:
                raise ValueError("more than may be sent ahead, or was sent")

    def _end_late_start(self, kind: bytes, content: bytes) -> None:
        """End a program whose caller left before it could learn of its start, as at a timeout."""
        if kind == relay.DATA and content[:2] == LATE_START and content[2:].strip().isdigit():
            self._tell_shell("signal", content[2:].strip().decode(), "KILL")

    def close_channel(self, channel: relay.LinkChannel) -> None:
        """Close a channel, which ends its program's pipes."""
        self._close_listeners(channel.number)
        super().close_channel(channel)
        self.send(relay.CLOSE, channel.number)

    def _read_control(self, _: int) -> None:
        try:
            data = self._control.recv(relay.READ_SIZE)
        except OSError:
            data = b""
        if not data:
            self._ends = True
            return
        *fields, rest = (self._messages + data).split(b"\0")
        while fields and len(fields) > int(fields[0]):
            count = int(fields[0]) + 1
            if message := self._translate([os.fsdecode(field) for field in fields[1:count]]):
                self._tell_shell(*message)
            del fields[:count]
        self._messages = b"".join(field + b"\0" for field in fields) + rest

    def _tell_shell(self, *message: str) -> None:
        data = os.fsencode("".join(f"{field}\0" for field in (str(len(message)), *message)))
        self.channels[relay.CONTROL].room -= len(data)
        self.send(relay.DATA, relay.CONTROL, bytes([relay.IN]) + data)

    def _translate(self, fields: list[str]) -> list[str]:
        """Return no fields if the sender has gone."""
        if fields[0] == "stop":
            fields[3] = str(int(fields[3]) + self._shift)
        if fields[0] != "spawn":
            return fields
        token, mode, program = fields[1], fields[2], ENV_AT + int(fields[4])
        number, opened = next(self._numbers), list[int]()
        try:
            for name in relay.NAMES:
                flags = (os.O_RDONLY if name == "in" else os.O_WRONLY) | relay.FLAGS | os.O_NOFOLLOW
                opened.append(os.open(self._folder.pipes / f"{token}.{name}", flags))
            self._send_files(number, fields[program:])
        except OSError:  # its caller has gone, and its pipes or files with it
            for descriptor in opened:
                os.close(descriptor)
            self._close_listeners(number)
            return []
        writes = dict(enumerate(opened[1:], relay.OUT))
        self.channels[number] = relay.LinkChannel(number, {opened[0]: relay.IN}, writes, [])
        self.send(relay.OPEN, number, token.encode())
        prefix = [] if mode == TRUSTED else self._prefix
        mode = "run" if mode == TRUSTED else mode
        return [*fields[:2], mode, *fields[3:program], *prefix, *fields[program:]]

    def _send_files(self, number: int, argv: Sequence[str]) -> None:
        for argument in argv:
            name = argument.removeprefix(f"{self._inside}/pipes/")
            file = self._folder.pipes / name
            if name != argument and "/" not in name and file.is_file():
                self.send(relay.FILE, 0, name.encode() + b"\0" + file.read_bytes())
                for channel in HOST_CHANNELS if name.endswith(".json") else ():
                    listener = socket.socket(socket.AF_UNIX)
                    self._listeners.setdefault(number, []).append(listener)
                    listener.bind(f"{self._folder.sockets}/{name[:-5]}-{CHANNELS.index(channel) + 1}")
                    listener.listen(1)
                    listener.setblocking(False)

    def _close_listeners(self, number: int) -> None:
        for listener in self._listeners.pop(number, []):
            listener.close()

    def _accept(self, listener: socket.socket, _: int) -> None:
        with suppress(BlockingIOError):
            connection, number = listener.accept()[0], next(self._numbers)
            self.send(relay.CONNECT, number, Path(listener.getsockname()).name.encode())
            self.channels[number] = relay.connected(number, connection, relay.IN, relay.OUT)

    def _call_owner(self, number: int) -> None:
        inside = [one for one in self.channels if one >= relay.INSIDE_FIRST]
        if not self.owner or len(inside) >= relay.MOST_CONNECTIONS:
            self.send(relay.CLOSE, number)
            return
        if number < relay.INSIDE_FIRST or number in inside:
            raise ValueError("a channel that is not new")
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", self.owner))
        self.channels[number] = relay.connected(number, connection, relay.IN, relay.OUT)
