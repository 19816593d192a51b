"""A run that was exported, read back from its file.

Guarantees: what is read equals what the service held; a file that was cut off, or is none, is an error and never a
shorter run. Plain and gzip are told apart by themselves; one rollout is in memory at a time. Needs pydantic only.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from pydantic import TypeAdapter, ValidationError

from api_schemas.exports import ExportedRun, ExportedSample, ExportEnd, ExportLine
from api_schemas.runs import Run

_LINE: TypeAdapter[ExportLine] = TypeAdapter(ExportLine)
_GZIP = b"\x1f\x8b"


class BadExportError(ValueError):
    """The file is not a whole export."""


class RunExport:
    """`RunExport(path).run` is the run, and `samples()` its rollouts."""

    def __init__(self, path: Path) -> None:
        """Raises BadExportError, OSError."""
        self.path = path
        first = next(self._lines(), None)
        if not isinstance(first, ExportedRun):
            raise BadExportError(f"{path} does not begin with a run")
        self.run: Run = first.run

    def samples(self) -> Iterator[ExportedSample]:
        """The rollouts in the order of their tasks; BadExportError at the place where the file is damaged."""
        count, ended = 0, False
        for line in self._lines():
            if isinstance(line, ExportedSample):
                count += 1
                yield line
            elif isinstance(line, ExportEnd):
                ended = line.samples == count
        if not ended:
            plural = "" if count == 1 else "s"
            raise BadExportError(f"{self.path} was cut off after {count} rollout{plural}: export it again")

    def _lines(self) -> Iterator[ExportLine]:
        done = 0
        try:
            with _opened(self.path) as file:
                for line in file:
                    yield _LINE.validate_json(line)
                    done += 1
        except (ValidationError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadExportError(f"{self.path}, line {done + 1}: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
    return cast("IO[bytes]", gzip.open(path)) if packed else path.open("rb")
