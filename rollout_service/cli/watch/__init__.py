"""`rollout-service watch`: show the work of a running server, live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from rollout_client.client import RolloutClient

EXAMPLE = "Example: rollout-service watch --url http://node-3:8080"

PATIENCE_SECONDS = 3_600.0


@common.command
async def command(
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every event as one JSON object per line.")] = False,
    after: Annotated[int | None, typer.Option(min=0, help="With --json: start after the event with this id.")] = None,
) -> None:
    """Show rollout states, engines, sandboxes, and speed until Ctrl-C; off a terminal, a line every few seconds."""
    from rollout_service.cli.watch.view import watch

    async with common.connect(url, key, patience_seconds=0.0) as client:
        await client.readiness()  # whatever it says: an error at once if nothing answers
    async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
        await (_print_events(client, after) if as_json else watch(client))


async def _print_events(client: RolloutClient, after: int | None) -> None:
    from contextlib import aclosing

    async with aclosing(client.events(after=after)) as events:
        async for event in events:
            common.print_line(event.model_dump_json())
