"""`rollout-service show`: show one rollout of a running server, its tokens, and its sub-agents, or save its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.show.colors import Coloring

if TYPE_CHECKING:
    from api_schemas.rollouts import Rollout
    from api_schemas.views.summaries import RolloutSummary
    from rollout_client.client import RolloutClient
    from rollout_service.cli.console import SafeConsole

EXAMPLE = "Example: rollout-service show r-1 --color logprob"


@common.client_command()
async def command(
    client: RolloutClient,
    rollout_id: Annotated[
        str,
        typer.Argument(
            help="Id of the rollout; `submit` writes it into each result.", autocompletion=completion.rollouts
        ),
    ],
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the sub-agents too: what each was for, and what it did.")
    ] = False,
    color: Annotated[
        Coloring | None,
        typer.Option(
            help="Show every token, colored by this: whether it was sampled, its probability, the version that "
            "sampled it, its turn, or its segment.",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(min=1, help="With --color: show the tokens of the sub-agent with this number."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the rollout's page as one HTML file, which needs no network and no server.",
            show_default=False,
        ),
    ] = None,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Use brackets instead of colors, as with NO_COLOR.")
    ] = False,
    no_pager: Annotated[bool, typer.Option("--no-pager", help="Never start a pager for long output.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text; with --color, with the trajectory.")
    ] = False,
) -> None:
    """Show the state of a rollout, its reward, why it ended, and which samples of its group branched off it; with
    --tree, its sub-agents, with --color, its tokens.

    With --html, all of that and its conversation and timeline are saved as a page in one file, to send or to keep.

    Control characters and other invisible ones are shown as escapes. Through a pipe, or without colors, brackets
    replace the colors.
    """
    from rollout_service.cli.show.trajectory import render_branches, render_head
    from rollout_service.cli.show.tree import render_tree

    rollout = await _get(client, rollout_id, trajectory=as_json and color is not None)
    if html is not None:
        await _save(client, rollout_id, html)
    nodes = await client.rollout_nodes(rollout_id) if tree else None
    if as_json:
        common.print_json(nodes or rollout)
        return
    console = common.out(color=not no_color)
    console.print(render_head(rollout))
    console.print(render_branches(rollout_id, await _group(client, rollout_id)))
    if nodes is not None:
        console.print(render_tree(nodes))
    if color is not None:
        await _show_tokens(client, console, rollout_id, color, node, pager=not no_pager)


async def _get(client: RolloutClient, rollout_id: str, *, trajectory: bool) -> Rollout:
    from rollout_client.client import NotFoundError

    try:
        return await client.get(rollout_id, trajectory=trajectory)
    except NotFoundError as error:
        raise common.CommandError(
            str(error),
            hint="Results of `submit` have the id as `rollout_id`; "
            f"curl -s {client.base_url}/v1/rollouts lists the rollouts of the server.",
        ) from error


async def _group(client: RolloutClient, rollout_id: str) -> list[RolloutSummary]:
    """Return the group that the id names; empty if there is none."""
    from rollout_client.client import InvalidRequestError
    from rollout_service.base.ids import SampleId

    try:
        sample = SampleId.parse(rollout_id)
        page = await client.summary_page(run=sample.run, group=sample.number, limit=1_000)
    except (ValueError, InvalidRequestError):  # a caller chose the id
        return []
    return page.rows


async def _save(client: RolloutClient, rollout_id: str, file: Path) -> None:
    from rollout_service.cli.files import written

    content = await client.saved_page(rollout_id)
    with written(file) as write:
        write(content)
    common.err().print(f"{file}: {len(content) / 1e6:.1f} MB. Open it in a browser.")


async def _show_tokens(
    client: RolloutClient,
    console: SafeConsole,
    rollout_id: str,
    color: Coloring,
    node: int | None,
    *,
    pager: bool,
) -> None:
    from rollout_service.cli.show.pages import print_parts
    from rollout_service.cli.show.tokens import render

    parts = render(client, rollout_id, color, node=node, plain=console.is_plain)
    await print_parts(console, parts, pager=pager)
