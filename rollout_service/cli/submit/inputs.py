"""The commands' input files.

Guarantee: a stream (a pipe, a FIFO, `/dev/stdin`, `<(command)`, or `-` for standard input) is read exactly once, to its
end, before a command begins; the command can then read it as often as any file.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO

from rollout_service.cli.common import CommandError

STDIN = "-"
READ_HINT = "Correct the path; - stands for the standard input."


def is_stream(path: Path) -> bool:
    """Return whether this input can be read only once."""
    return str(path) == STDIN or not path.is_file()


@contextmanager
def reread(path: Path) -> Iterator[Path]:
    """Yield a path that can be read any number of times: the file itself, or a temporary copy of a stream.

    This blocks until the stream ends, so call it before an event loop starts.

    Raises:
        CommandError: The input cannot be read.
    """
    if not is_stream(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="rollout-input-") as copy:
        try:
            with _opened(path) as stream:
                shutil.copyfileobj(stream, copy)
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}", hint=READ_HINT) from error
        copy.flush()
        yield Path(copy.name)


def read_whole(path: Path) -> bytes:
    """Return the content of a file or stream.

    Raises:
        CommandError: The file or stream cannot be read.
    """
    try:
        with _opened(path) as stream:
            return stream.read()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}", hint=READ_HINT) from error


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer) if str(path) == STDIN else path.open("rb")
