"""Reads single keys from the terminal, beside what is shown on it.

Guarantee: however the block is left, the terminal is as it was before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio


async def read_keys(press: Callable[[str], None]) -> None:
    """Call `press` with each key until cancelled; do nothing without a terminal to read from."""
    if not sys.stdin.isatty():
        return
    descriptor = sys.stdin.fileno()
    with unbuffered(descriptor):
        while True:
            await anyio.wait_readable(descriptor)
            keys = os.read(descriptor, 64)
            if not keys:  # the terminal is gone
                return
            for key in keys.decode(errors="ignore"):
                press(key)


@contextmanager
def unbuffered(descriptor: int) -> Iterator[None]:
    """Have the terminal hand over each key at once, and show none, within the block."""
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
