"""Read an exported run from its file.

Guarantees: the rollouts read are equal to those that the service held; a truncated file, or one that is not an export,
is an error and never a shorter run. gzip is detected; one rollout is in memory at a time.
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
    """The file is not a complete export."""


class RunExport:
    """An exported run: `run` is the run itself, `samples()` yields its rollouts."""

    def __init__(self, path: Path) -> None:
        """Read the run.

        Raises:
            BadExportError: The file does not begin with a run.
            OSError: The file cannot be read.
        """
        self.path = path
        first = next(self._lines(), None)
        if not isinstance(first, ExportedRun):
            raise BadExportError(f"{path} is not an export: it does not begin with a run")
        self.run: Run = first.run

    def samples(self) -> Iterator[ExportedSample]:
        """Yield the rollouts in the order of their tasks.

        Raises:
            BadExportError: The iteration reached damage in the file, or its end is missing.
        """
        count, ended = 0, False
        for line in self._lines():
            if isinstance(line, ExportedSample):
                count += 1
                yield line
            elif isinstance(line, ExportEnd):
                ended = line.samples == count
        if not ended:
            plural = "" if count == 1 else "s"
            raise BadExportError(
                f"{self.path} is truncated after {count} rollout{plural}. Export the run again."
            )

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
