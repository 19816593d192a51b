"""`rollout-service harness`: list the programs that can be the agent, and check that one works here."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson

app = typer.Typer(
    name="harness",
    help="List the programs that can be the agent of an environment, and check that one works here.",
    no_args_is_help=True,
)


@app.command("list", epilog="Example: rollout-service harness list")
@common.command
def list_(as_json: AsJson = False) -> None:
    """List the harnesses, with the versions that their images have."""
    from rollout_service.agents.harnesses.registry import harnesses
    from rollout_service.cli.console import id_column, table

    presets = harnesses()
    if as_json:
        common.print_json(presets)
        return
    rows = table(id_column("name"), "program", "version", "speaks", "image")
    for preset in presets:
        rows.add_row(preset.name, preset.title, preset.version, preset.dialect, preset.image or "")
    common.out().print(rows)


@app.command("check", epilog="Example: rollout-service harness check codex")
@common.command
async def check(
    name: Annotated[str, typer.Argument(help="A harness, from `harness list`.")],
    turns: Annotated[int, typer.Option(min=1, max=64, help="Steps to take, each a call of its shell tool.")] = 3,
    image: Annotated[str | None, typer.Option(help="The image that has it; by default the preset's.")] = None,
    as_json: AsJson = False,
) -> int:
    """Let a scripted model drive a harness in its sandbox, and look at the recorded rollout.

    It succeeds if the program took every step, its work was scored, and all its turns are in one segment.
    """
    from rollout_service.cli.harness_check import check_harness, show_check

    found = await check_harness(name, turns, image)
    common.print_json(found) if as_json else show_check(found)
    return 0 if found["works"] else 1
