"""Files of requests and of results, with one JSON document per line.

An invalid line is reported by its number, and affects no other line. A request without an id gets one derived from the
file's name, the line's number, and its content, so a second run submits nothing twice. To the next run, a result is in
the file completely or not at all: a truncated last line is removed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

from pydantic import ValidationError

from api_schemas.rollouts import Rollout, RolloutRequest
from rollout_service.base import strict_json
from rollout_service.base.validation import describe_problems
from rollout_service.cli.common import CommandError

LONGEST_STEM = 64
BEGIN = b'{"rollout_id":'
"""The beginning of every result, since the id is its first field."""


@dataclass(slots=True)
class RequestFile:
    """The requests of a file, read as needed; with `environment`, a line is just an instance for it."""

    path: Path
    stem: str
    """The prefix of generated ids."""
    bad_line: Callable[[int, str], None]
    """Called with the number (from 1) of each line that is not a request, and the reason."""
    environment: str | None = None
    lines: dict[str, int] = field(default_factory=dict)
    """The line number of each id, as far as the file has been read."""
    pools: dict[str, int] = field(default_factory=dict)
    """The first line that is for each pool, as far as the file has been read."""

    def __iter__(self) -> Iterator[RolloutRequest]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield from self._request(number, line.strip())

    def count(self) -> int:
        with self.path.open("rb") as file:
            return sum(1 for line in file if line.strip())

    def _request(self, number: int, line: bytes) -> Iterator[RolloutRequest]:
        try:
            document = self._document(line)
            document["rollout_id"] = document.get("rollout_id") or self._id(number, line)
            request = RolloutRequest.model_validate(document)
        except ValidationError as error:
            self.bad_line(number, "; ".join(describe_problems(error, RolloutRequest)))
            return
        except ValueError as error:
            self.bad_line(number, str(error))
            return
        rollout_id = str(request.rollout_id)
        if rollout_id in self.lines:
            self.bad_line(number, f"line {self.lines[rollout_id]} has the same rollout_id {rollout_id}")
            return
        self.lines[rollout_id] = number
        self.pools.setdefault(request.pool, number)
        yield request

    def _document(self, line: bytes) -> dict[str, Any]:
        document: dict[str, Any] = strict_json.parse_row(line)
        if self.environment is None:
            return document
        return {"task": {"environment": self.environment, "instance": document}}

    def _id(self, number: int, line: bytes) -> str:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", self.stem).lstrip("._-")[:LONGEST_STEM]
        return f"{stem or 'tasks'}-{number}-{hashlib.sha256(line).hexdigest()[:12]}"


class ResultFile:
    """A file that finished rollouts are appended to. `done` has the ids that it had when it was opened.

    Raises:
        ValueError: The file holds something other than results; raised on entering.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._file = stack.enter_context(self.path.open("a+b"))
            self._file.truncate(self._read(self._file))
            stack.pop_all()
        return self

    def _read(self, file: BinaryIO) -> int:
        """Collect the ids of existing results; return where the complete lines end."""
        file.seek(0)
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and _is_torn(line):
                break
            end += len(line)
            self.done.add(self._rollout_id(number, line))
        return end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, rollout: Rollout) -> None:
        """Write a result; it has reached the operating system when this returns."""
        if self._file is None:
            raise RuntimeError("open the file first: with ResultFile(path) as results")
        self._file.write(rollout.model_dump_json().encode() + b"\n")
        self._file.flush()

    def _rollout_id(self, number: int, line: bytes) -> str:
        try:
            return str(json.loads(line)["rollout_id"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path}, line {number}: not a rollout's result") from None


def _is_torn(line: bytes) -> bool:
    """Return whether an unterminated line is part of a result; anything else is not ours to remove."""
    length = min(len(line), len(BEGIN))
    return line[:length] == BEGIN[:length]


STDIN = "-"
READ_HINT = "Correct the path; - stands for the standard input."


def is_stream(path: Path) -> bool:
    """Return whether this input can be read only once: a pipe, a FIFO, or `-` for standard input."""
    return str(path) == STDIN or not path.is_file()


@contextmanager
def reread(path: Path) -> Iterator[Path]:
    """Yield a path that can be read any number of times: the file itself, or a temporary copy of a stream.

    This blocks until the stream ends, so call it before an event loop starts.
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
    try:
        with _opened(path) as stream:
            return stream.read()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}", hint=READ_HINT) from error


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer) if str(path) == STDIN else path.open("rb")
