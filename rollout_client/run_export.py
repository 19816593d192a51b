"""Read an exported run from its file.

The rollouts read are equal to those that the service held; a truncated file, or one that is not an export, is an error
and never a shorter run. gzip is detected; one rollout is in memory at a time.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from pydantic import TypeAdapter, ValidationError

from api_schemas.exports import ExportedNode, ExportedRun, ExportedSample, ExportEnd, ExportLine
from api_schemas.rollouts.trees import AgentNode
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
        self._format = first.format

    def samples(self) -> Iterator[ExportedSample]:
        """Yield the rollouts in the order of their tasks, with their sub-agents if the run asked for them.

        Raises:
            BadExportError: The iteration reached damage in the file, or its end is missing.
        """
        count, ended = 0, False
        for line in self._lines() if self._format == 1 else _with_nodes(self._lines(), self.path):
            if isinstance(line, ExportedSample):
                count += 1
                yield line
            elif isinstance(line, ExportEnd):
                ended = line.samples == count
        if not ended:
            plural = "" if count == 1 else "s"
            raise BadExportError(f"{self.path} is truncated after {count} rollout{plural}. Export the run again.")

    def _lines(self) -> Iterator[ExportLine]:
        done = 0
        try:
            with _opened(self.path) as file:
                for line in file:
                    yield _LINE.validate_json(line)
                    done += 1
        except (ValidationError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadExportError(f"{self.path}, line {done + 1}: {error}") from error


def _with_nodes(lines: Iterator[ExportLine], path: Path) -> Iterator[ExportLine]:
    """Yield each sample with the sub-agents that follow it, unless it may lack some, and all other lines."""
    held: ExportLine | None = None
    nodes: list[AgentNode] = []
    for line in lines:
        if not isinstance(line, ExportedNode):
            if held is not None:
                yield _joined(held, nodes)
            held, nodes = line, []
        elif isinstance(held, ExportedSample) and held.sample.rollout.rollout_id == line.rollout_id:
            nodes.append(line.node)
        else:
            raise BadExportError(f"{path}: a sub-agent of {line.rollout_id} is not after its rollout")
    if isinstance(held, ExportEnd):
        yield held


def _joined(line: ExportLine, nodes: list[AgentNode]) -> ExportLine:
    if not isinstance(line, ExportedSample) or not nodes:
        return line
    rollout = line.sample.rollout.model_copy(update={"nodes": nodes})
    return line.model_copy(update={"sample": line.sample.model_copy(update={"rollout": rollout})})


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
    return cast("IO[bytes]", gzip.open(path)) if packed else path.open("rb")
