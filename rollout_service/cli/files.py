"""Files that commands write: whole, or not at all. A file is written next to its place, and moved there at its end."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rollout_service.cli.common import CommandError

if TYPE_CHECKING:
    from rollout_client.runs import ClientRun

Write = Callable[[bytes | bytearray], object]

_GZIP = 16 + zlib.MAX_WBITS
_LEVEL = 3


@contextmanager
def written(output: Path, *, hint: str = "Name another file with --output.") -> Iterator[Write]:
    """Yield the function that writes pieces of the file; move it to its place if the block succeeds.

    A file that is replaced leaves its permissions to the new one.
    """
    part = output.with_name(f".{output.name}.part")
    try:
        try:
            with part.open("wb") as file:
                if output.exists():
                    shutil.copymode(output, part)
                if output.suffix == ".gz":
                    yield from _compressed(file)
                else:
                    yield file.write
            os.replace(part, output)  # noqa: PTH105 - over what was there
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error}", hint=hint) from error


def _compressed(file: IO[bytes]) -> Iterator[Write]:
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP)
    yield lambda piece: file.write(packer.compress(piece))
    file.write(packer.flush())


async def export_atif(run: ClientRun, output: Path) -> tuple[int, int]:
    """Write a run's rollouts as ATIF trajectories, one JSON document per line.

    Returns how many were written, and how many have no conversation.
    """
    import anyio.to_thread

    with written(output) as write, tempfile.TemporaryDirectory(prefix="rollout-atif-") as folder:
        whole = Path(folder) / "run.jsonl.gz"
        await run.export(whole)
        return await anyio.to_thread.run_sync(_write_atif, whole, write)


def _write_atif(whole: Path, write: Write) -> tuple[int, int]:
    from rollout_client.adapters.atif import to_atif
    from rollout_client.run_export import RunExport
    from rollout_service import __version__

    count = left_out = 0
    for sample in RunExport(whole).samples():
        try:
            document = to_atif(sample.sample.rollout, version=__version__)
        except ValueError:  # its trajectory was pruned, or it never began
            left_out += 1
            continue
        write(json.dumps(document).encode() + b"\n")
        count += 1
    return count, left_out
