"""Reads the steps of rollouts from a server, and writes their trace.

Guarantees: the file is whole, or is not there: it is written beside its place, and moved there at its end. One rollout
is in memory at a time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from api_schemas.events import EventKind
from api_schemas.rollouts.steps import RolloutAttempts
from rollout_client.client import NotFoundError, RolloutClient
from rollout_service.cli.common import CommandError
from rollout_service.observability.tracing.perfetto import RolloutTrace
from rollout_service.observability.tracing.perfetto.events import Write

_EARLIER_SECONDS = 60.0
"""How much before the first rollout the time line begins, since nodes' clocks differ."""
_GZIP = 16 + zlib.MAX_WBITS
_LEVEL = 3


async def write_trace(client: RolloutClient, names: Sequence[str], output: Path) -> RolloutTrace:
    """Write the trace of a run, or of rollouts; return it.

    Raises:
        CommandError: None of them has steps, or the file cannot be written.
        NotFoundError: One of them is unknown.
    """
    run, began = await _find(client, names)
    lines = client.step_lines(run=run) if run is not None else client.step_lines(rollouts=names)
    with written(output) as write:
        trace = RolloutTrace(write, began=began - _EARLIER_SECONDS)
        async for line in lines:
            trace.add(RolloutAttempts.model_validate_json(line))
        if not trace.rollouts:
            raise CommandError(
                "there are no steps yet",
                hint="Wait until a rollout has begun.",
            )
        events = client.events(after=0, kinds=[EventKind.WEIGHTS_UPDATED], follow=False)
        trace.end([event async for event in events])
    return trace


async def _find(client: RolloutClient, names: Sequence[str]) -> tuple[str | None, float]:
    """Return the run, if it is one, and when the oldest of the named ones was created, in Unix seconds."""
    if len(names) == 1:
        with suppress(NotFoundError):
            run = await client.open_run(names[0]).view()
            return run.run_id, run.created_at.timestamp()
    created = [(await client.get(name)).created_at.timestamp() for name in names]
    return None, min(created)


@contextmanager
def written(output: Path) -> Iterator[Write]:
    """Yield the function that takes the pieces of the file; move it to its place if the block succeeds.

    Raises:
        CommandError: The file cannot be written.
    """
    part = output.with_name(f".{output.name}.part")
    try:
        try:
            with part.open("wb") as file:
                if output.suffix == ".gz":
                    yield from _compressed(file)
                else:
                    yield file.write
            os.replace(part, output)  # noqa: PTH105 - over what was there
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error}", hint="Name another file.") from error


def _compressed(file: IO[bytes]) -> Iterator[Write]:
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP)
    yield lambda piece: file.write(packer.compress(piece))
    file.write(packer.flush())
