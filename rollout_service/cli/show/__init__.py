"""`rollout-service show`: show one rollout of a running server, and the tree of its sub-agents."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import DEFAULT_URL, Key, Url

EXAMPLE = "Example: rollout-service show r-1 --tree"


def command(
    rollout_id: Annotated[str, typer.Argument(help="Id of the rollout; `submit` prints the ids.")],
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the sub-agents too: what each was for, and what it did.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the state of a rollout, its reward and why it ended; with --tree, its sub-agents."""

    async def main() -> None:
        from rollout_service.cli.show.trajectory import render_head
        from rollout_service.cli.show.tree import render_tree

        async with common.connect(url, key) as client:
            rollout = await client.get(rollout_id)
            nodes = await client.rollout_nodes(rollout_id) if tree else None
        if as_json:
            common.print_json((nodes or rollout).model_dump(mode="json"))
            return
        common.out().print(render_head(rollout))
        if nodes is not None:
            common.out().print(render_tree(nodes))

    common.run(main)
