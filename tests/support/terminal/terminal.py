"""Runs a command on a terminal of its own, and reads what it draws."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

SECONDS = 60.0
_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")
_HOME = "\x1b[H"


class Terminal:
    """A command on a terminal; `drawn` is all that it has written."""

    def __init__(self, command: Sequence[str], *, size: tuple[int, int], environ: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.drawn = ""
        self._resize(slave, size)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**inherited, "TERM": "xterm-256color", **environ},
            preexec_fn=take_terminal,
        )

    @property
    def frame(self) -> str:
        """The text of the last whole frame, without escape sequences."""
        frames = self.drawn.split(_HOME)
        return _SEQUENCE.sub("", frames[-2] if len(frames) > 1 else self.drawn)

    @property
    def sequences(self) -> set[str]:
        """The escape sequences that were written."""
        return {match[0] for match in _SEQUENCE.finditer(self.drawn)}

    @property
    def settings(self) -> list[object]:
        """The settings of the terminal now."""
        return termios.tcgetattr(self._slave)

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the window."""
        self._resize(self._master, (columns, lines))

    def hang_up(self) -> None:
        """Close the terminal, as a window that is closed does."""
        os.close(self._master)
        self._master = -1

    def until(self, condition: Callable[[], bool]) -> None:
        """Read until a condition holds."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.drawn[-4_000:]
            self._read(0.05)

    def ended(self) -> int:
        """Read until the command has ended; return its exit code."""
        self.until(lambda: self.process.poll() is not None)
        while self._read(0.1):
            pass
        return self.process.returncode

    def close(self) -> None:
        """End the command, and the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        if self._master >= 0:
            os.close(self._master)
        os.close(self._slave)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if ready:
            self.drawn += os.read(self._master, 1 << 16).decode(errors="replace")
        return bool(ready)

    @staticmethod
    def _resize(descriptor: int, size: tuple[int, int]) -> None:
        columns, lines = size
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def terminal(command: Sequence[str], *, size: tuple[int, int] = (120, 40), **environ: str) -> Iterator[Terminal]:
    """Run a command on a terminal; end it with the block."""
    running = Terminal(command, size=size, environ=environ)
    try:
        yield running
    finally:
        running.close()
