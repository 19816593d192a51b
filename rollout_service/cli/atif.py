"""`runs export --atif`: the rollouts of a run as ATIF trajectories, one JSON document per line."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import IO, cast

import anyio.to_thread

from rollout_client.adapters.atif import to_atif
from rollout_client.run_export import RunExport
from rollout_client.runs import ClientRun
from rollout_service import __version__
from rollout_service.cli.common import CommandError


async def export_atif(run: ClientRun, output: Path) -> tuple[int, int]:
    """Write a run's rollouts to a file; return how many were written, and how many have no conversation.

    Raises:
        CommandError: The file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rollout-atif-") as folder:
            whole = Path(folder) / "run.jsonl.gz"
            await run.export(whole)
            return await anyio.to_thread.run_sync(_convert, whole, output)
    except OSError as error:
        raise CommandError(str(error), hint="Name another file with --output.") from error


def _convert(whole: Path, output: Path) -> tuple[int, int]:
    written = left_out = 0
    with _opened(output) as file:
        for sample in RunExport(whole).samples():
            try:
                document = to_atif(sample.sample.rollout, version=__version__)
            except ValueError:  # its trajectory was pruned, or it never began
                left_out += 1
                continue
            file.write(json.dumps(document).encode() + b"\n")
            written += 1
    return written, left_out


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "wb")) if path.suffix == ".gz" else path.open("wb")
