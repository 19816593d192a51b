"""The process of a real server that a test starts, stops, kills and pauses."""

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import psutil


class ServerProcess:
    """A server with a folder of its own; a subclass starts it."""

    end_seconds: ClassVar[float] = 30.0
    """How long it may take to end."""
    process: psutil.Popen | None

    def start(self) -> None:
        """Start it and wait until it answers; what was durable before is there again."""
        raise NotImplementedError

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal, and wait until it has ended; `start` goes on with its files."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(self.end_seconds)
            self.process = None

    def kill(self) -> None:
        """End it as a crash would."""
        self.stop(signal.SIGKILL)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep it from running until the end of the block: connections stay open, and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


S = TypeVar("S", bound=ServerProcess)


@contextmanager
def in_own_folder(make: Callable[[Path], S], prefix: str) -> Iterator[S]:
    """Run a server for the block, in a folder with a short path: that of a Unix socket has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    server = make(folder)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.send_signal(signal.SIGCONT)
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
