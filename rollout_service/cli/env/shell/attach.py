"""Connects this process's terminal to one in a sandbox: keys, output, and the size of the window.

Guarantee: the terminal is as it was before when the connection ends. While it lasts, every key goes to the sandbox,
Ctrl-C too, and this terminal obeys the escape sequences that come from there.
"""

from __future__ import annotations

import os
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from rollout_service.cli.common import CommandError
from sandboxes.sessions.terminal import SandboxTerminal
from sandboxes.task_groups import open_task_group

STDIN, STDOUT = 0, 1
READ_SIZE = 4096
HUNG_UP = 128 + signal.SIGHUP
"""The exit code if this process's terminal was closed."""
DEFAULT_SIZE = (24, 80)
"""For a terminal that does not know its size."""


def require_terminal() -> None:
    """Refuse to go on without a terminal.

    Raises:
        CommandError: The standard input or output is not a terminal.
    """
    if not (os.isatty(STDIN) and os.isatty(STDOUT)):
        raise CommandError(
            "the standard input and output must be a terminal",
            hint="Run it in a terminal; over ssh, with `ssh -t`.",
        )


def size_of_terminal() -> tuple[int, int]:
    """Return the lines and the columns of the window."""
    size = os.get_terminal_size(STDOUT)
    return (size.lines, size.columns) if size.lines and size.columns else DEFAULT_SIZE


async def attach(terminal: SandboxTerminal) -> int:
    """Connect both terminals until the sandbox's ends or this one is closed; return the command's exit code.

    Raises:
        SandboxClosedError: The sandbox has ended.
    """
    code = HUNG_UP
    with _raw():
        async with open_task_group() as tasks:
            tasks.start_soon(_pass_keys, terminal, tasks.cancel_scope, name="keys")
            tasks.start_soon(_pass_sizes, terminal, name="sizes of the window")
            if await _show(terminal):
                code = await terminal.wait()
            tasks.cancel_scope.cancel()
    return code


@contextmanager
def _raw() -> Iterator[None]:
    """Let the terminal pass every key on as it is."""
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)
    try:
        yield
    finally:
        with suppress(termios.error):  # it may have been closed
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


async def _pass_keys(terminal: SandboxTerminal, ending: anyio.CancelScope) -> None:
    """Pass keys on; end the connection if the terminal is closed."""
    with suppress(OSError):
        while True:
            await anyio.wait_readable(STDIN)
            keys = os.read(STDIN, READ_SIZE)
            if not keys:
                break
            if not await terminal.type(keys):
                return
    ending.cancel()


async def _pass_sizes(terminal: SandboxTerminal) -> None:
    with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
        async for _ in changes:
            await terminal.resize(*size_of_terminal())


async def _show(terminal: SandboxTerminal) -> bool:
    """Show what the sandbox's terminal shows, to its end; return False if this one was closed before."""
    while shown := await terminal.receive():
        try:
            while shown:
                await anyio.wait_writable(STDOUT)
                shown = shown[os.write(STDOUT, shown[:READ_SIZE]) :]
        except OSError:
            return False
    return True
