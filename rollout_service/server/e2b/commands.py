"""The commands of E2B's sandboxes: the service `process.Process` of the daemon that E2B has in each.

Guarantees: as in E2B, a command belongs to its sandbox and not to the request that started it, and its time-out ends
it. What it prints is sent as it comes, and is bounded here: a client that reads slowly holds the command up, one that
has gone does not. A sandbox runs at most `MAX_COMMANDS` at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

from rollout_service.server.e2b.boxes import Box
from sandboxes import RunningProgram, SandboxError

MAX_COMMANDS, MAX_LISTENERS, BUFFERED = 128, 16, 8
"""Of a sandbox, of a command, and the events that wait for each listener, of at most 64 KiB."""
MAX_STRINGS = 4_096
"""The most arguments and variables of a command."""
IDLE_SECONDS = 0.25
"""How long output may be silent after the end of a command before it is taken for that of the background."""
INPUT_SECONDS = 60.0
PING_SECONDS = (1.0, 50.0)
"""The shortest and the longest time between two signs of life of a silent command."""
KILLED = 137
Event = process_pb.ProcessEvent
ENDED = ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended before the stream completed")
log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class Command:
    """A command of a sandbox."""

    request: Any
    deadline: float
    program: RunningProgram | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    listeners: set[MemoryObjectSendStream[Any]] = field(default_factory=set)
    _reads: dict[str, anyio.CancelScope] = field(default_factory=dict)
    _reads_until: float = math.inf

    @property
    def pid(self) -> int:
        """The id of its process group inside."""
        return self.program.group if self.program is not None else 0

    def listen(self) -> MemoryObjectReceiveStream[Any]:
        """Return the command's events from now on.

        Raises:
            ConnectError: Too many listen.
        """
        self.listeners = {one for one in self.listeners if one.statistics().open_receive_streams}
        if len(self.listeners) >= MAX_LISTENERS:
            raise ConnectError(Code.FAILED_PRECONDITION, f"{MAX_LISTENERS} clients read the command's output")
        sending, receiving = anyio.create_memory_object_stream[Any](BUFFERED)
        self.listeners.add(sending)
        return receiving

    async def run(self, box: Box, started: Callable[[], None]) -> None:
        """Run to the end, and tell all who listen."""
        config, last = self.request.process, Event(event=Oneof("end", _end(-1, "signal: killed")))
        self.scope.deadline = self.deadline
        try:
            with self.scope:
                argv, cwd = [config.cmd, *config.args], config.cwd if config.has_field("cwd") else None
                async with box.sandbox.program(argv, cwd=cwd, env=dict(config.envs)) as self.program:
                    if self.request.has_field("stdin") and not self.request.stdin:
                        self.program.close_input()
                    started()
                    last = Event(event=Oneof("end", _exit(await self._stream(self.program))))
            if self.scope.cancelled_caught and anyio.current_time() >= self.deadline:
                last = ConnectError(Code.DEADLINE_EXCEEDED, "the command did not end in time")
            await self._tell(last)
        except ValueError as error:
            await self._tell(ConnectError(Code.INVALID_ARGUMENT, str(error)))
        except SandboxError as error:
            log.info("a command of a program's sandbox failed", sandbox=box.sandbox.id, error=str(error))
        finally:
            for listener in self.listeners:
                listener.close()
            started()

    async def _stream(self, program: RunningProgram) -> int:
        """Send both outputs until the program has ended and they have, or are silent; return its exit code."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._pump, "stdout", program.receive)
            tasks.start_soon(self._pump, "stderr", program.receive_errors)
            code = await program.wait()
            self._reads_until = anyio.current_time() + IDLE_SECONDS
            for scope in self._reads.values():
                scope.deadline = self._reads_until
        if code != KILLED:
            program.leave_group()
        return code

    async def _pump(self, name: str, receive: Callable[[], Awaitable[bytes]]) -> None:
        while True:
            data = b""
            with anyio.CancelScope(deadline=self._reads_until) as self._reads[name]:
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


def _exit(code: int) -> Any:
    return _end(-1, "signal: killed") if code == KILLED else _end(code, f"exit status {code}", exited=True)


def _end(code: int, status: str, *, exited: bool = False) -> Any:
    return Event.EndEvent(exit_code=code, exited=exited, status=status)


class ProcessCalls(process_connect.Process):  # type: ignore[misc]  # generated, without types
    """Answers for the commands of all sandboxes; `find` returns the sandbox of a request."""

    def __init__(self, find: Callable[[Any], Box]) -> None:
        self._find = find
        self._commands: weakref.WeakKeyDictionary[Box, list[Command]] = weakref.WeakKeyDictionary()

    def _running(self, ctx: Any) -> list[Command]:
        return self._commands.setdefault(self._find(ctx), [])

    def _command(self, selector: Any, ctx: Any) -> Command:
        wanted = selector.selector if selector is not None else None
        for command in self._running(ctx):
            tag = command.request.tag if command.request.has_field("tag") else None
            if wanted is not None and wanted.value == (command.pid if wanted.field == "pid" else tag):
                return command
        raise ConnectError(Code.NOT_FOUND, "there is no such command; it may have ended")

    async def list(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        _ = request
        return process_pb.ListResponse(
            processes=[
                process_pb.ProcessInfo(
                    config=command.request.process,
                    pid=command.pid,
                    **({"tag": command.request.tag} if command.request.has_field("tag") else {}),
                )
                for command in self._running(ctx)
                if command.program is not None
            ]
        )

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        """Start a command, and yield its events."""
        box, running = self._find(ctx), self._running(ctx)
        _check(request, len(running))
        left = ctx.timeout_ms
        command = Command(request, math.inf if left is None else anyio.current_time() + left / 1000)
        events, started = command.listen(), anyio.Event()

        async def run() -> None:
            running.append(command)
            try:
                await command.run(box, started.set)
            except Exception as error:
                log.exception("a command failed", error=str(error))
            finally:
                running.remove(command)

        box.tasks.start_soon(run)
        await started.wait()
        async for event in _events(command, events, ctx):
            yield process_pb.StartResponse(event=event)

    async def connect(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        """Yield the events of a running command from now on."""
        command = self._command(request.process, ctx)
        async for event in _events(command, command.listen(), ctx):
            yield process_pb.ConnectResponse(event=event)

    async def send_input(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        await _send(self._command(request.process, ctx), request.input)
        return process_pb.SendInputResponse()

    async def stream_input(self, request: AsyncIterator[Any], ctx: Any) -> Any:
        """Send pieces of input in their order; the first message names the command."""
        command: Command | None = None
        async for message in request:
            match message.event:
                case Oneof(field="start", value=start):
                    command = self._command(start.process, ctx)
                case Oneof(field="data", value=data) if command is not None:
                    await _send(command, data.input)
        return process_pb.StreamInputResponse()

    async def close_stdin(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        if (program := self._command(request.process, ctx).program) is not None:
            program.close_input()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        """Kill a command with its process group, or ask it to end."""
        command = self._command(request.process, ctx)
        if request.signal == process_pb.Signal.SIGKILL:
            command.scope.cancel()
        elif request.signal == process_pb.Signal.SIGTERM:
            with suppress(SandboxError):
                await self._find(ctx).sandbox.exec(["bash", "-c", f"kill -TERM -- -{command.pid}"], cwd="/")
        else:
            raise ConnectError(Code.INVALID_ARGUMENT, "the signal is neither SIGKILL nor SIGTERM")
        return process_pb.SendSignalResponse()


def _check(request: Any, running: int) -> None:
    """Check that a command may be started.

    Raises:
        ConnectError: It may not.
    """
    if request.has_field("pty"):
        raise ConnectError(
            Code.UNIMPLEMENTED, "terminals are not served here; run a command with `stdin=True`"
        )
    if running >= MAX_COMMANDS:
        raise ConnectError(Code.RESOURCE_EXHAUSTED, f"{MAX_COMMANDS} commands run in the sandbox")
    if request.process is None or not request.process.cmd:
        raise ConnectError(Code.INVALID_ARGUMENT, "there is no command")
    if len(request.process.args) + len(request.process.envs) > MAX_STRINGS:
        raise ConnectError(Code.INVALID_ARGUMENT, f"more than {MAX_STRINGS} arguments and variables")


async def _events(command: Command, events: MemoryObjectReceiveStream[Any], ctx: Any) -> AsyncIterator[Any]:
    """Yield the start of a command and then what comes, with signs of life, to its end."""
    asked = ctx.request_headers.get("keepalive-ping-interval", "")
    pause = min(max(float(asked) if asked.isdecimal() else math.inf, PING_SECONDS[0]), PING_SECONDS[1])
    with events:
        if command.program is not None:
            yield Event(event=Oneof("start", Event.StartEvent(pid=command.pid)))
        while True:
            event = Event(event=Oneof("keepalive", Event.KeepAlive()))
            try:
                with anyio.move_on_after(pause):
                    event = await events.receive()
            except anyio.EndOfStream:
                raise ENDED from None
            if isinstance(event, ConnectError):
                raise event
            yield event
            if event.event.field == "end":
                return


async def _send(command: Command, data: Any) -> None:
    """Send input to a command.

    Raises:
        ConnectError: It has no terminal, takes no more input, or does not read.
    """
    if data is None or data.input is None or data.input.field != "stdin":
        raise ConnectError(Code.UNIMPLEMENTED, "the command has no terminal; send to its `stdin`")
    try:
        with anyio.fail_after(INPUT_SECONDS):
            if command.program is None or not await command.program.send(data.input.value):
                raise ConnectError(Code.FAILED_PRECONDITION, "the command takes no more input")
    except TimeoutError:
        raise ConnectError(
            Code.DEADLINE_EXCEEDED, f"the command read nothing for {INPUT_SECONDS:.0f} s"
        ) from None
