"""Prints output that may be longer than the screen: through a pager on a terminal, and at once everywhere else."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

from rich.console import Console
from rich.segment import Segment, Segments

from rollout_service.cli.console import SafeConsole

PAGER = "less -R"


async def print_parts(console: SafeConsole, parts: AsyncIterator[list[Segment]], *, pager: bool) -> None:
    """Print styled texts as they come, or, if they fill a terminal, in a pager once all are there."""
    if not (pager and console.is_terminal and sys.stdin.isatty()):
        async for part in parts:
            console.file.write(as_text(console, part))
            console.file.flush()
        return
    text = "".join([as_text(console, part) async for part in parts])
    if fits(text, console) or not page(text):
        console.file.write(text)
        console.file.flush()


def as_text(console: SafeConsole, part: list[Segment]) -> str:
    """Return what the console writes, with all spaces."""
    with console.capture() as captured:
        Console.print(console, Segments(part), end="", soft_wrap=True)
    return captured.get()


def fits(text: str, console: SafeConsole) -> bool:
    """Return whether a text certainly fits the screen, with a line for the prompt."""
    lines = text.split("\n")
    return sum(1 + len(line) // console.width for line in lines) < console.height


def page(text: str) -> bool:
    """Show a text in `$PAGER`, and return whether there is one; leaving it early is not an error."""
    command = shlex.split(os.environ.get("PAGER") or PAGER)
    environ = {"LESS": "-RFX"} | os.environ
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    except OSError:
        return False
    with suppress(BrokenPipeError, KeyboardInterrupt):
        process.communicate(text.encode(errors="replace"))
    while process.poll() is None:
        with suppress(KeyboardInterrupt):  # Ctrl-C belongs to the pager
            process.wait()
    return True
