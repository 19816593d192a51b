"""`rollout-service trace`: write a run or rollouts of a running server as a trace that Perfetto opens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion

if TYPE_CHECKING:
    from rollout_client.client import RolloutClient
    from rollout_service.observability.tracing.perfetto import RolloutTrace

EXAMPLE = "Example: rollout-service trace my-run -o run.json.gz"
VIEWER = "https://ui.perfetto.dev"
_EARLIER_SECONDS = 60.0
"""The time line begins this much before the first rollout, since nodes' clocks differ."""


@common.client_command()
async def command(
    client: RolloutClient,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|ROLLOUT...", help="A run, or rollouts, by their ids.", autocompletion=completion.runs
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; compressed if its name ends in .gz.")
    ],
) -> None:
    """Write the steps of rollouts, with their engines and sandboxes, as a trace for Perfetto."""
    trace = await write_trace(client, names, output)
    rollouts = common.count(trace.rollouts, "rollout")
    common.err().print(f"{output}: {rollouts}, {trace.events} events. Open it at {VIEWER}")


async def write_trace(client: RolloutClient, names: list[str], output: Path) -> RolloutTrace:
    """Write the trace of a run, or of rollouts, one rollout at a time."""
    from api_schemas.events import EventKind
    from api_schemas.rollouts.steps import RolloutAttempts
    from rollout_service.cli.files import written
    from rollout_service.observability.tracing.perfetto import RolloutTrace

    run, began = await _find(client, names)
    lines = client.step_lines(run=run) if run is not None else client.step_lines(rollouts=names)
    with written(output) as write:
        trace = RolloutTrace(write, began=began - _EARLIER_SECONDS)
        async for line in lines:
            trace.add(RolloutAttempts.model_validate_json(line))
        if not trace.rollouts:
            raise common.CommandError("there are no steps yet", hint="Wait until a rollout has begun.")
        events = client.events(after=0, kinds=[EventKind.WEIGHTS_UPDATED], follow=False)
        trace.end([event async for event in events])
    return trace


async def _find(client: RolloutClient, names: list[str]) -> tuple[str | None, float]:
    """Return the run, if it is one, and the earliest creation in Unix seconds."""
    from rollout_client.client import NotFoundError

    if len(names) == 1:
        with suppress(NotFoundError):
            run = await client.open_run(names[0]).view()
            return run.run_id, run.created_at.timestamp()
    created = [(await client.get(name)).created_at.timestamp() for name in names]
    return None, min(created)
