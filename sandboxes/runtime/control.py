"""The host's side of `control.sh`, the first process of every sandbox, and of the processes it starts.

The control shell reads from one end of a socket pair, which the agent's programs do not have, so they cannot start,
signal or confuse anything through it. When the host's end closes, even by the service's death, the shell ends and
everything inside with it.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from sandboxes.errors import NoProcessError, SandboxClosedError, SandboxStartError
from sandboxes.runtime.pipes import Pipes, StatusLines

SCRIPT = Path(__file__).with_name("control.sh")
ANSWERS = "answers"
SPAWN_TIMEOUT = 30.0
"""The shell retries a failed fork for 15 s."""
ANSWER_TIMEOUT = 20.0
SEND_TIMEOUT = 30.0
"""A shell that accepts nothing for so long is lost."""
KILLED = 128 + 9
TICKS = 100
"""Per second: USER_HZ of every Linux that Python and Apptainer run on."""


def ticks_now() -> int:
    """Return the time in the units of /proc/PID/stat's start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)


class ControlShell:
    def __init__(
        self,
        channel: socket.socket,
        pipes: Path,
        answers: "Answers | None" = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """
        Args:
            channel: the host's end of the socket pair.
            pipes: the folder for pipes, as the host sees it.
            answers: where the shell answers, if not on the channel.
            prefix: begins every program's command, for example to drop rights.
        """
        channel.setblocking(False)
        self._channel = channel
        self._pipes = pipes
        self._lock = anyio.Lock(fast_acquire=True)
        self._asking = anyio.Lock(fast_acquire=True)
        self._answers = answers
        self._prefix = tuple(prefix)
        self._loop = asyncio.get_running_loop()
        self._short = bytearray()
        """Short messages that wait for room, perhaps without the beginning of the first."""
        self._other_end = StatusLines(channel.fileno(), self._end)
        self._replies = StatusLines(answers.fd) if answers else self._other_end
        self._starting: set[StatusLines] = set()
        self.was_closed = False
        """Whether the host's end closed before the other one."""

    @property
    def alive(self) -> bool:
        return not self._other_end.ended

    async def wait_until_ready(self) -> bool:
        """Return False if the shell ended instead."""
        ready = await self._replies.next() == "ready"
        if self._answers is not None:
            self._answers.unlink()
        return ready

    async def spawn(self, mode: str, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> "Child":
        """Start a process. Mode "run" reports its exit code; mode "session" leaves it the status pipe.

        Raises:
            SandboxClosedError: The sandbox has ended.
            SandboxStartError: The process did not start in time, for example because no process was left.
        """
        token = secrets.token_hex(8)
        if not self.alive:
            raise SandboxClosedError("the sandbox has ended")
        try:
            pipes = Pipes(self._pipes / token)
        except OSError as error:
            raise SandboxStartError(
                f"cannot make the pipes of a process: {error}", hint="raise the limit on open files"
            ) from error
        child = Child(self, pipes)
        self._starting.add(child.status)
        try:
            entries = [f"{name}={value}" for name, value in env.items()]
            await self.send("spawn", token, mode, cwd, str(len(entries)), *entries, *self._prefix, *argv)
            await child.wait_until_started()
        except BaseException:
            child.discard()
            raise
        finally:
            self._starting.discard(child.status)
        return child

    async def stop(self, group: int, name: str, since: int, kept: Sequence[int], tries: int = 1) -> None:
        """Interrupt a session's shell, and signal its processes that started after `since`, in ticks.

        The processes `kept` and their descendants are spared, whatever their age. If there is no process to signal,
        for example between two programs of a loop, the search is repeated up to `tries` times.
        """
        await self.send("stop", str(group), name, str(since), str(tries), *map(str, kept))

    async def end_all(self) -> None:
        """End every process except the control shell.

        Raises:
            SandboxClosedError: The sandbox has ended, or does not answer.
        """
        await self._ask("end", "the sandbox's processes did not end")

    async def wait_until_done(self) -> None:
        """Wait until every message sent so far has been carried out, including signals.

        Raises:
            SandboxClosedError: The sandbox has ended, or does not answer.
        """
        await self._ask("rest", "the sandbox does not answer")

    async def _ask(self, question: str, failure: str) -> None:
        """Wait until the shell has done it. Answers to cancelled callers are skipped."""
        token = secrets.token_hex(8)
        async with self._asking:
            await self.send(question, token)
            with anyio.move_on_after(ANSWER_TIMEOUT):
                while (line := await self._replies.next()) is not None:
                    if line == token:
                        return
        raise SandboxClosedError(failure)

    async def send(self, *fields: str) -> None:
        """Send one message. Cancellation sends nothing before the first byte, and waits for the last one after it.

        Raises:
            SandboxClosedError: The sandbox has ended, or was ended because it accepted no more messages.
            ValueError: A field contains a NUL character.
        """
        message = _encode(fields)
        try:
            async with self._lock:
                view = memoryview(message)
                while view:
                    if not self.alive:
                        raise SandboxClosedError("the sandbox has ended")
                    try:
                        if len(view) == len(message):
                            self._send_short()
                        view = view[self._channel.send(view) :]
                    except BlockingIOError:
                        await self._wait_for_room(begun=len(view) < len(message))
                    except OSError as error:
                        self._other_end.close()
                        raise SandboxClosedError("the sandbox has ended") from error
        finally:
            if self._short:
                self._flush()
            if not self.alive:
                self.close()

    async def _wait_for_room(self, *, begun: bool) -> None:
        """Wait for room. The rest of a begun message must follow, or the next would be read as part of it."""
        with anyio.move_on_after(SEND_TIMEOUT, shield=begun) as scope:
            await anyio.wait_writable(self._channel)
        if scope.cancelled_caught:
            self.close()
            raise SandboxClosedError("the sandbox accepted no more messages and was ended")

    def send_now(self, *fields: str) -> None:
        """Send a short message as soon as there is room, without waiting; it is lost if the sandbox has ended."""
        self._short += _encode(fields)
        self._flush()

    def _flush(self) -> None:
        """Send short messages, unless another message is being sent: its sender calls this again."""
        if self.alive and not self._lock.locked():
            self._loop.remove_writer(self._channel)
            try:
                self._send_short()
            except BlockingIOError:
                self._loop.add_writer(self._channel, self._flush)
            except OSError:
                self._other_end.close()
                self.close()

    def _send_short(self) -> None:
        while self._short:
            del self._short[: self._channel.send(self._short)]

    def _end(self) -> None:
        if not self._lock.locked():
            self._loop.remove_writer(self._channel)
        for status in (*self._starting, self._replies):  # pipes that nobody will open, and answers that nobody gives
            status.close()

    def close(self) -> None:
        """Close the host's end, which ends everything inside. Idempotent."""
        self.was_closed = self.was_closed or self.alive
        self._other_end.close()
        if self._answers is not None:
            self._answers.close()
        if self._lock.locked():  # the event loop watches it for a sender, who closes it
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
        else:
            self._channel.close()


def _encode(fields: Sequence[str]) -> bytes:
    message = "".join(f"{field}\0" for field in (str(len(fields)), *fields)).encode("utf-8", "surrogateescape")
    if message.count(b"\0") != len(fields) + 1:
        raise ValueError("a program's arguments, variables and folder must not contain NUL characters")
    return message


class Answers:
    """A named pipe for the answers of a control shell whose standard input is one-way, like a container's.

    Its name is removed as soon as the shell has opened it, before anything else runs inside.
    """

    def __init__(self, pipes: Path) -> None:
        """
        Raises:
            OSError: The pipe cannot be made.
        """
        self._path = pipes / ANSWERS
        os.mkfifo(self._path)
        self._path.chmod(0o666)  # protected by its folder, which others cannot enter
        self.fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)

    def unlink(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Child:
    """A process that the control shell started, and the leader of its process group."""

    def __init__(self, control: ControlShell, pipes: Pipes) -> None:
        self._control = control
        self.pipes = pipes
        self.status = StatusLines(pipes.fds["st"])
        self.group = 0
        """The process id inside, also that of its group."""

    async def wait_until_started(self) -> None:
        line: str | None = None
        with anyio.move_on_after(SPAWN_TIMEOUT):
            line = await self.status.next()
        if line is None and not self._control.alive:
            raise SandboxClosedError("the sandbox has ended")
        self._note_start(line)
        if not self.group:
            raise NoProcessError("cannot start a process in the sandbox")
        self.pipes.mark_opened()

    def _note_start(self, line: str | None) -> None:
        if line is not None and line[:1] == "+" and line[1:].isdigit():
            self.group = int(line[1:])

    async def wait_for_exit(self) -> int | None:
        """Return the exit code of mode "run", or None if the process's parent was killed too."""
        line = await self.status.next()
        return int(line) if line is not None and line.isdigit() else None

    def shell_exit_code(self, code: int | None) -> int:
        """Return the code as a shell reports it, even of a process that was killed with its whole group.

        Raises:
            SandboxClosedError: The sandbox has ended, and the process with it.
        """
        if code is None and not self._control.alive:
            raise SandboxClosedError("the sandbox has ended")
        return KILLED if code is None else code

    @property
    def has_ended(self) -> bool:
        """A process of mode "run" writes nothing else after its start."""
        return self.status.ended or self.status.waiting

    async def signal(self, name: str) -> None:
        await self._control.send("signal", str(self.group), name)

    def discard(self) -> None:
        """Kill the group and close the pipes, without waiting. Idempotent."""
        if not self.group:  # it may have started since its caller left
            self._note_start(self.status.next_now())
        if self.group and not self.status.ended:
            self._control.send_now("signal", str(self.group), "KILL")
        self.release()

    def release(self) -> None:
        """Close the pipes, and leave the processes of the group alone. Idempotent."""
        self.status.close()
        self.pipes.unlink()
        self.pipes.close()
