"""`rollout-service trace`: write a run or rollouts of a running server as a trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, Key, Url

EXAMPLE = "Example: rollout-service trace my-run -o run.json.gz"
VIEWER = "https://ui.perfetto.dev"


@common.command
async def command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|ROLLOUT...", help="A run, or rollouts, by their ids.", autocompletion=completion.runs
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; compressed if its name ends in .gz.")
    ],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Write the steps of rollouts, with their engines and sandboxes, as a trace for Perfetto."""
    from rollout_service.cli.trace_file import write_trace

    async with common.connect(url, key) as client:
        written = await write_trace(client, names, output)
    rollouts = common.count(written.rollouts, "rollout")
    common.err().print(f"{output}: {rollouts}, {written.events} events. Open it at {VIEWER}")
