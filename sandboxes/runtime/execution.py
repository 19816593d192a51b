"""Run a program in a sandbox: collect its output, stream it, or speak with it over its pipes."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from sandboxes.contract import ExecResult, RunningProgram
from sandboxes.errors import FileStalledError, FileTooLargeError, SandboxClosedError
from sandboxes.limits.violations import LimitViolations
from sandboxes.runtime.control import Child, ControlShell
from sandboxes.runtime.pipes import ERROR, INPUT, OUTPUT, READ_SIZE, OutputBuffer, Reader

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL at the timeout."""
MESSAGE_LIMIT = 4096
STALL_SECONDS = 30.0
"""The sandbox's side of a stream may stall for so long; its programs may be hostile."""


async def run_collected(
    control: ControlShell,
    argv: Sequence[str],
    *,
    stdin: bytes,
    cwd: str,
    env: Mapping[str, str],
    timeout: float,
    output_limit: int,
    violations: LimitViolations,
) -> ExecResult:
    out, err = OutputBuffer(output_limit), OutputBuffer(output_limit)
    code: int | None = None
    with anyio.move_on_after(timeout) as scope:
        child = await control.spawn("run", argv, cwd=cwd, env=env)
        readers = {OUTPUT: Reader(child.pipes.fds[OUTPUT]), ERROR: Reader(child.pipes.fds[ERROR])}
        try:
            readers[OUTPUT].start(out.add)
            readers[ERROR].start(err.add)
            code = child.shell_exit_code(await _feed(child, stdin))
        finally:
            if scope.cancel_called:
                await _terminate(child)
            for reader in readers.values():
                reader.stop()
            if code is None:
                child.discard()
            else:  # it has ended by itself, and its background processes go on
                child.release()
    timed_out, truncated = scope.cancelled_caught, out.truncated or err.truncated
    return ExecResult(
        None if timed_out else code,
        out.bytes(),
        err.bytes(),
        timed_out,
        truncated,
        violations.drain_with_call(timeout if timed_out else None, output_limit if truncated else None),
    )


async def _feed(child: Child, stdin: bytes) -> int | None:
    """Write the input while waiting for the end, since a program may end without reading it."""
    async with anyio.create_task_group() as tasks:

        async def write() -> None:
            await child.pipes.write(stdin)
            child.pipes.close(INPUT)

        if stdin:
            tasks.start_soon(write)
        else:
            child.pipes.close(INPUT)
        code = await child.wait_for_exit()
        tasks.cancel_scope.cancel()
    return code


async def _terminate(child: Child) -> None:
    """End a program that has timed out, and keep its last output."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(GRACE), suppress(SandboxClosedError):
        await child.signal("TERM")
        await child.wait_for_exit()


class ProgramFailedError(Exception):
    def __init__(self, exit_code: int, said: str) -> None:
        super().__init__(f"ended with {exit_code}: {said}")
        self.exit_code = exit_code
        self.said = said
        """The end of the program's standard error."""


@asynccontextmanager
async def _started(
    control: ControlShell, argv: Sequence[str], mode: str, env: Mapping[str, str], collected: Sequence[str]
) -> AsyncIterator[Child]:
    """Start a program in `/`; after the block, wait for its end.

    Raises:
        FileStalledError: It did not end within `STALL_SECONDS`.
        ProgramFailedError: It failed; the error quotes its `collected` outputs.
    """
    child, said = await control.spawn(mode, argv, cwd="/", env=env), OutputBuffer(MESSAGE_LIMIT)
    readers = [Reader(child.pipes.fds[name]) for name in collected]
    try:
        for reader in readers:
            reader.start(said.add)
        yield child
        with _stall_limit():
            code = child.shell_exit_code(await child.wait_for_exit())
        for reader in readers:
            reader.stop()
        if code != 0:
            raise ProgramFailedError(code, said.text())
    finally:
        for reader in readers:
            reader.close()
        child.discard()


async def stream_out(
    control: ControlShell,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    limit: int | None,
    mode: str = "run",
) -> AsyncGenerator[bytes, None]:
    """Yield the output of a program that starts in `/`, as fast as the caller takes it.

    Raises:
        FileTooLargeError: The output is longer than `limit`.
        FileStalledError: Nothing arrived for `STALL_SECONDS`.
        ProgramFailedError: The program failed.
    """
    total = 0
    async with _started(control, argv, mode, env, (ERROR,)) as child:
        child.pipes.close(INPUT)
        while data := await _read_some(child):
            total += len(data)
            if limit is not None and total > limit:
                raise FileTooLargeError(f"more than {limit} bytes", hint="raise the limit, or request less")
            yield data


async def stream_in(
    control: ControlShell, argv: Sequence[str], data: AsyncIterable[bytes], *, env: Mapping[str, str]
) -> int:
    """Return how many bytes the program took, which starts in `/`.

    Raises:
        FileStalledError: The program took nothing for `STALL_SECONDS`.
        ProgramFailedError: The program failed.
    """
    total = 0
    async with _started(control, argv, "run", env, (OUTPUT, ERROR)) as child:
        async for part in data:
            if not await _send(child, part, _stall_limit):
                break
            total += len(part)
        child.pipes.close(INPUT)
    return total


async def _read_some(child: Child) -> bytes:
    with _stall_limit():
        return await child.pipes.read(OUTPUT)


async def _send(child: Child, data: bytes, each: Callable[[], AbstractContextManager[object]] = nullcontext) -> bool:
    """Return False if the program takes no more; `each` makes the context of each piece."""
    for at in range(0, len(data), READ_SIZE):
        with each():
            await anyio.lowlevel.checkpoint()
            if not await child.pipes.write(data[at : at + READ_SIZE]):
                return False
    return True


@contextmanager
def _stall_limit() -> Iterator[None]:
    try:
        with anyio.fail_after(STALL_SECONDS):
            yield
    except TimeoutError as error:
        raise FileStalledError(f"a program in the sandbox transferred nothing for {STALL_SECONDS:.0f} s") from error


ERRORS_LIMIT = 16 * 1024


class ProgramPipes(RunningProgram):
    def __init__(self, child: Child) -> None:
        self._child = child
        self._errors = OutputBuffer(ERRORS_LIMIT)
        self._reader = Reader(child.pipes.fds[ERROR])
        self._reader.start(self._errors.add)
        self._sending = anyio.Lock(fast_acquire=True)
        self._code: int | None = None
        self._leaves_group = False

    @property
    def group(self) -> int:
        return self._child.group

    async def send(self, data: bytes) -> bool:
        async with self._sending:  # the pieces of two callers must not mix
            return await _send(self._child, data)

    def close_input(self) -> None:
        self._child.pipes.close(INPUT)

    async def receive(self) -> bytes:
        return await self._child.pipes.read(OUTPUT)

    async def receive_errors(self) -> bytes:
        self._reader.close()  # what is in the pipe stays there: it may be more than `errors` keeps
        if early := self._errors.bytes():
            self._errors = OutputBuffer(ERRORS_LIMIT)
            return early
        return await self._child.pipes.read(ERROR)

    def errors(self) -> str:
        return self._errors.text()

    async def wait(self) -> int:
        if self._code is None:
            self._code = self._child.shell_exit_code(await self._child.wait_for_exit())
            self._reader.stop()
        return self._code

    def leave_group(self) -> None:
        self._leaves_group = True

    def close(self) -> None:
        """Kill the program, unless its group is left alone. Idempotent."""
        self._reader.close()
        if self._leaves_group:
            self._child.release()
        else:
            self._child.discard()


@asynccontextmanager
async def running(
    control: ControlShell, argv: Sequence[str], *, cwd: str, env: Mapping[str, str]
) -> AsyncIterator[RunningProgram]:
    """
    Raises:
        SandboxClosedError, SandboxStartError: The program cannot be started, as in `Sandbox.program`.
    """
    program = ProgramPipes(await control.spawn("run", argv, cwd=cwd, env=env))
    try:
        yield program
    finally:
        program.close()


class ProgramStream(ByteStream):
    """A program as a stream of anyio. The program ends with its own block, not with the stream."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self._rest = b""

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        data = self._rest or await self._program.receive()
        if not data:
            raise anyio.EndOfStream
        self._rest = data[max_bytes:]
        return data[:max_bytes]

    async def send(self, item: bytes) -> None:
        if not await self._program.send(item):
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        self._program.close_input()

    async def aclose(self) -> None:
        self._program.close_input()
