"""One program in a process of its own inside of a sandbox: collected whole, or as streams."""

from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence

import anyio

from sandboxes.contract import ExecResult
from sandboxes.control import Child, ControlShell
from sandboxes.errors import FileTooLargeError, SandboxFileError
from sandboxes.output import OutputBuffer
from sandboxes.pipes import ERROR, INPUT, OUTPUT, READ_SIZE, Reader, read_some, write_all

GRACE = 1.0
"""Between SIGTERM and SIGKILL for a program at its time-out."""
MESSAGE_LIMIT = 4096


async def run_collected(
    control: ControlShell,
    argv: Sequence[str],
    *,
    stdin: bytes,
    cwd: str,
    env: Mapping[str, str],
    timeout: float,
    output_limit: int,
) -> ExecResult:
    """Run a program to its end, or to its time-out; the same errors as `Sandbox.exec`."""
    out, err = OutputBuffer(output_limit), OutputBuffer(output_limit)
    code: int | None = None
    with anyio.move_on_after(timeout) as scope:
        child = await control.spawn("run", argv, cwd=cwd, env=env)
        readers = {OUTPUT: Reader(child.pipes.fds[OUTPUT]), ERROR: Reader(child.pipes.fds[ERROR])}
        try:
            readers[OUTPUT].start(out.add)
            readers[ERROR].start(err.add)
            code = await _feed(child, stdin)
        finally:
            if scope.cancel_called:
                await _terminate(child)
            for reader in readers.values():
                reader.stop()
            child.discard()
    timed_out = scope.cancelled_caught
    return ExecResult(
        None if timed_out else code, out.bytes(), err.bytes(), timed_out, out.truncated or err.truncated
    )


async def _feed(child: Child, stdin: bytes) -> int | None:
    """Write the input beside waiting for the end: a program may end without reading it."""
    async with anyio.create_task_group() as tasks:

        async def write() -> None:
            if stdin and child.stdin is not None:
                await write_all(child.stdin, stdin)
            child.pipes.close(INPUT)

        if stdin:
            tasks.start_soon(write)
        else:
            child.pipes.close(INPUT)
        code = await child.exit_code()
        tasks.cancel_scope.cancel()
    return code


async def _terminate(child: Child) -> None:
    """End the group of a program whose time is over; what it prints on its way out is kept."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(GRACE):
        await child.signal("TERM")
        await child.exit_code()


async def stream_out(
    control: ControlShell, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], limit: int
) -> AsyncGenerator[bytes, None]:
    """The standard output of a program, as fast as it is taken.

    Raises:
        FileTooLargeError: it is longer than `limit`.
        SandboxFileError: the program failed; the message is its standard error.
    """
    child = await control.spawn("run", argv, cwd=cwd, env=env)
    errors, total = OutputBuffer(MESSAGE_LIMIT), 0
    reader = Reader(child.pipes.fds[ERROR])
    reader.start(errors.add)
    try:
        child.pipes.close(INPUT)
        while (data := read_some(child.stdout, READ_SIZE)) != b"":
            if data is None:
                await anyio.wait_readable(child.stdout)
                continue
            total += len(data)
            if total > limit:
                raise FileTooLargeError(f"more than {limit} bytes", hint="allow more, or export less")
            yield data
        code = await child.exit_code()
        reader.stop()
        if code != 0:
            raise SandboxFileError(errors.text().strip() or f"{argv[0]} ended with {code}")
    finally:
        reader.stop()
        child.discard()


async def stream_in(
    control: ControlShell,
    argv: Sequence[str],
    data: AsyncIterable[bytes],
    *,
    cwd: str,
    env: Mapping[str, str],
) -> None:
    """Feed a stream to a program's standard input.

    Raises:
        SandboxFileError: the program failed; the message is its standard error.
    """
    child = await control.spawn("run", argv, cwd=cwd, env=env)
    output = OutputBuffer(MESSAGE_LIMIT)
    readers = [Reader(child.pipes.fds[name]) for name in (OUTPUT, ERROR)]
    try:
        for reader in readers:
            reader.start(output.add)
        async for part in data:
            if child.stdin is None or not await write_all(child.stdin, part):
                break
        child.pipes.close(INPUT)
        code = await child.exit_code()
        for reader in readers:
            reader.stop()
        if code != 0:
            raise SandboxFileError(output.text().strip() or f"{argv[0]} ended with {code}")
    finally:
        for reader in readers:
            reader.stop()
        child.discard()
