"""The commands of E2B's sandboxes: the service `process.Process` of the daemon that E2B has in each.

As in E2B, a command belongs to its sandbox and not to the request that started it, and its timeout ends it. Output is
sent as it comes; a client that reads slowly holds the command up, one that has gone does not.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

from api_schemas.errors import sentences
from rollout_service.server.e2b.boxes import CURRENT_BOX, Box
from sandboxes import RunningProgram, SandboxClosedError, SandboxError
from sandboxes.sessions.terminal import SandboxTerminal, open_terminal

MAX_COMMANDS = 128
"""The most commands that run in a sandbox at once."""
MAX_STRINGS = 4_096
"""The most arguments and variables of a command together."""
MAX_SIZE = 1_000
"""The most lines, or columns, of a terminal."""
BUFFERED = 8
"""The most events, of up to 64 KiB each, that wait for a listener."""
IDLE_SECONDS = 0.25
"""Output that is silent for longer after the end of a command is that of background processes."""
INPUT_SECONDS, PING_SECONDS = 60.0, 10.0
"""How long input may wait for the command, and output for a keepalive, which shows whether the client is there."""
KILLED = 137
Event = process_pb.ProcessEvent
ReceiveOutput = Callable[[], Awaitable[bytes]]
Listener = MemoryObjectSendStream[Any]
log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class Command:
    request: Any
    deadline: float
    program: RunningProgram | None = None
    terminal: SandboxTerminal | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    started: anyio.Event = field(default_factory=anyio.Event)
    """Set once the command runs, or cannot."""
    listeners: set[Listener] = field(default_factory=set)
    _reads: dict[str, anyio.CancelScope] = field(default_factory=dict)
    _reads_until: float = math.inf

    def listen(self) -> MemoryObjectReceiveStream[Any]:
        """Return the command's events from now on; without a last event, the command was lost."""
        sending, receiving = anyio.create_memory_object_stream[Any](BUFFERED)
        self.listeners.add(sending)
        return receiving

    async def run(self, box: Box) -> None:
        last: Any = _end(KILLED)
        try:
            with self.scope:
                self.scope.deadline = self.deadline
                last = await self._run(box)
            if self.scope.cancelled_caught and box.scope.cancel_called:
                raise SandboxClosedError("the sandbox has ended")
            if self.scope.cancelled_caught and anyio.current_time() >= self.deadline:
                last = ConnectError(Code.DEADLINE_EXCEEDED, "the command did not end in time")
            await self._tell(last)
        except ValueError as error:
            await self._tell(ConnectError(Code.INVALID_ARGUMENT, str(error)))
        except SandboxError as error:
            if isinstance(error, SandboxClosedError) or not box.sandbox.running:
                log.info("a command of a program was lost", sandbox=box.sandbox.id, error=str(error))
            else:
                await self._tell(ConnectError(Code.FAILED_PRECONDITION, sentences(str(error), error.hint)))
        finally:
            self.started.set()
            for listener in self.listeners:
                listener.close()

    async def _run(self, box: Box) -> Any:
        async with self._open(box) as (program, outputs):
            self.program = program
            self.started.set()
            async with anyio.create_task_group() as tasks:
                for name, receive in outputs.items():
                    tasks.start_soon(self._pump, name, receive)
                code = await program.wait()
                self._reads_until = anyio.current_time() + IDLE_SECONDS
                for scope in self._reads.values():
                    scope.deadline = self._reads_until
            if code != KILLED:
                program.leave_group()
        return _end(code)

    @asynccontextmanager
    async def _open(self, box: Box) -> AsyncIterator[tuple[RunningProgram, dict[str, ReceiveOutput]]]:
        """Start the program, on a terminal if asked for, and yield it with its outputs by E2B's names."""
        config = self.request.process
        argv, env = [config.cmd, *config.args], dict(config.envs)
        cwd = config.cwd if config.has_field("cwd") else None
        if self.request.has_field("pty"):
            lines, columns = _size(self.request)
            async with open_terminal(
                box.sandbox, argv, lines=lines, columns=columns, cwd=cwd, env=env
            ) as self.terminal:
                yield self.terminal.program, {"pty": self.terminal.receive}
            return
        async with box.sandbox.program(argv, cwd=cwd, env=env) as program:
            if self.request.has_field("stdin") and not self.request.stdin:
                program.close_input()
            yield program, {"stdout": program.receive, "stderr": program.receive_errors}

    async def _pump(self, name: str, receive: ReceiveOutput) -> None:
        is_last = False
        while not is_last:
            # Listeners may have taken all the time. A pipe has at most one piece left of the command itself.
            is_last = (now := anyio.current_time()) >= self._reads_until
            data = b""
            with anyio.CancelScope(deadline=now + IDLE_SECONDS if is_last else self._reads_until) as self._reads[name]:
                data = await receive()
            if not data:
                return
            await self._tell(Event(event=Oneof("data", Event.DataEvent(output=Oneof(name, data)))))

    async def _tell(self, event: Any) -> None:
        for listener in list(self.listeners):
            try:
                await listener.send(event)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.listeners.discard(listener)
                listener.close()


def _end(code: int) -> Any:
    if code == KILLED:
        return Event(event=Oneof("end", Event.EndEvent(exit_code=-1, status="signal: killed")))
    return Event(event=Oneof("end", Event.EndEvent(exit_code=code, exited=True, status=f"exit status {code}")))


class ProcessCalls(process_connect.Process):  # type: ignore[misc]  # generated, without types
    async def list(self, *_: Any) -> Any:
        running = [(one.request.process, one.program) for one in CURRENT_BOX.get().commands]
        infos = [process_pb.ProcessInfo(config=config, pid=it.group) for config, it in running if it is not None]
        return process_pb.ListResponse(processes=infos)

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        box = CURRENT_BOX.get()
        _check(request, len(box.commands))
        seconds = math.inf if ctx.timeout_ms is None else ctx.timeout_ms / 1000
        command = Command(request, anyio.current_time() + seconds)
        events = command.listen()

        async def run() -> None:
            try:
                await command.run(box)
            except Exception as error:
                log.exception("a command failed", error=str(error))
            finally:
                box.commands.remove(command)

        box.commands.append(command)
        box.tasks.start_soon(run)
        async for event in _events(command, events):
            yield process_pb.StartResponse(event=event)

    async def connect(self, request: Any, _: Any) -> AsyncIterator[Any]:
        command = _command(request)
        async for event in _events(command, command.listen()):
            yield process_pb.ConnectResponse(event=event)

    async def update(self, request: Any, _: Any) -> Any:
        terminal, (lines, columns) = _command(request).terminal, _size(request)
        if terminal is None:
            raise ConnectError(Code.FAILED_PRECONDITION, "the command has no terminal")
        with _input_limit():
            await terminal.resize(lines, columns)
        return process_pb.UpdateResponse()

    async def send_input(self, request: Any, _: Any) -> Any:
        await _send(_command(request), request.input)
        return process_pb.SendInputResponse()

    async def stream_input(self, request: AsyncIterator[Any], _: Any) -> Any:
        command: Command | None = None
        async for message in request:
            if message.event.field == "start":
                command = _command(message.event.value)
            elif message.event.field == "data":
                await _send(command, message.event.value.input)
        return process_pb.StreamInputResponse()

    async def close_stdin(self, request: Any, _: Any) -> Any:
        if (program := _command(request).program) is not None:
            program.close_input()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request: Any, _: Any) -> Any:
        command = _command(request)
        if request.signal != process_pb.Signal.SIGKILL:
            raise ConnectError(Code.INVALID_ARGUMENT, "the only signal is SIGKILL; run `kill` inside for others")
        command.scope.cancel()
        return process_pb.SendSignalResponse()


def _command(request: Any) -> Command:
    wanted = request.process.selector.value if request.process and request.process.selector else None
    commands: list[Command] = CURRENT_BOX.get().commands
    for command in commands:
        if command.program is not None and command.program.group == wanted:
            return command
    raise ConnectError(Code.NOT_FOUND, "there is no such command; it may have ended")


def _check(request: Any, running: int) -> None:
    if request.has_field("pty"):
        _size(request)
    if running >= MAX_COMMANDS:
        raise ConnectError(Code.RESOURCE_EXHAUSTED, f"{MAX_COMMANDS} commands run in the sandbox")
    if not request.process or len(request.process.args) + len(request.process.envs) > MAX_STRINGS:
        raise ConnectError(Code.INVALID_ARGUMENT, f"no command, or over {MAX_STRINGS} arguments and variables")


async def _events(command: Command, events: MemoryObjectReceiveStream[Any]) -> AsyncIterator[Any]:
    with events:  # also if the client goes before the start, or the command would wait for it
        await command.started.wait()
        if command.program is not None:
            yield Event(event=Oneof("start", Event.StartEvent(pid=command.program.group)))
        while True:
            event = Event(event=Oneof("keepalive", Event.KeepAlive()))
            try:
                with anyio.move_on_after(PING_SECONDS):
                    event = await events.receive()
            except anyio.EndOfStream:
                raise ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended") from None
            if isinstance(event, ConnectError):
                raise event
            yield event
            if event.event.field == "end":
                return


def _size(request: Any) -> tuple[int, int]:
    size = request.pty and request.pty.size
    if not size or not (0 < size.rows <= MAX_SIZE and 0 < size.cols <= MAX_SIZE):
        raise ConnectError(Code.INVALID_ARGUMENT, f"a terminal has 1 to {MAX_SIZE} rows and columns")
    return size.rows, size.cols


async def _send(command: Command | None, data: Any) -> None:
    if command is None or command.program is None:
        raise ConnectError(Code.INVALID_ARGUMENT, "there is no command for the input")
    terminal, kind = command.terminal, "stdin" if command.terminal is None else "pty"
    if not data or data.input.field != kind:
        raise ConnectError(Code.INVALID_ARGUMENT, f"there is no input for its `{kind}`")
    send = command.program.send if terminal is None else terminal.type
    with _input_limit():
        if not await send(data.input.value):
            raise ConnectError(Code.FAILED_PRECONDITION, "the command takes no more input")


@contextmanager
def _input_limit() -> Iterator[None]:
    try:
        with anyio.fail_after(INPUT_SECONDS):
            yield
    except TimeoutError:
        raise ConnectError(Code.DEADLINE_EXCEEDED, "the command did not read its input") from None
