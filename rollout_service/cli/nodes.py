"""`rollout-service nodes`: list and drain the nodes that share a store, say what they wait for, and change one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url

if TYPE_CHECKING:
    from api_schemas.nodes import NodeConcurrency, NodePatch, NodeView
    from api_schemas.views.overview import Overview

app = typer.Typer(
    name="nodes",
    help="List and drain the nodes that share a store, and change how much one does at once.",
    no_args_is_help=True,
)

Node = Annotated[
    str,
    typer.Argument(help="Name of the node; `nodes list` shows the names.", autocompletion=completion.nodes),
]

Figure = Annotated[int | None, typer.Option(min=1, show_default=False)]


@app.command("list", epilog="Example: rollout-service nodes list --url http://node-1:8080")
@common.command
async def list_(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """List the nodes that share the server's store, what they wait for, and what one more node would bring.

    Dead ones stay until they are removed or join again.
    """
    async with common.connect(url, key) as client:
        nodes, overview = await client.nodes(), await client.overview()
    if not as_json:
        _print_nodes(nodes, as_json=False)
        _print_limit(overview)
        return
    said = overview.model_dump(mode="json", include={"bottleneck", "next_node"})
    common.print_json({"nodes": [node.model_dump(mode="json") for node in nodes], **said})


@app.command("drain", epilog="Example: rollout-service nodes drain node-2")
@common.command
async def drain(node: Node, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Let a node end its rollouts and begin no more, for example before maintenance. Any server can be asked."""
    async with common.connect(url, key) as client:
        _print_nodes([await client.drain_node(node)], as_json)


@app.command("resume", epilog="Example: rollout-service nodes resume node-2")
@common.command
async def resume(node: Node, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Let a drained node begin rollouts again."""
    async with common.connect(url, key) as client:
        _print_nodes([await client.resume_node(node)], as_json)


@app.command("remove", epilog="Example: rollout-service nodes remove node-2")
@common.command
async def remove(node: Node, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Remove a dead node from the list."""
    async with common.connect(url, key) as client:
        await client.remove_node(node)
    common.out().print(f"removed {node}")


@app.command("show", epilog="Example: rollout-service nodes show --json")
@common.command
async def show(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show the workers and queues of each stage, and the sandboxes."""
    async with common.connect(url, key) as client:
        _print(await client.node(), as_json)


@app.command("set", epilog="Example: rollout-service nodes set --rollout-workers 64 --max-sandboxes 128")
@common.command
async def change(
    init_workers: Figure = None,
    init_queue: Figure = None,
    rollout_workers: Figure = None,
    rollout_queue: Figure = None,
    evaluate_workers: Figure = None,
    evaluate_queue: Figure = None,
    max_sandboxes: Annotated[
        int | None, typer.Option(min=2, help="The most sandboxes alive at once.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change the limits until the server restarts; work under way continues.

    To make a change permanent, put it in rollout.toml.
    """
    stages = {
        "init": {"workers": init_workers, "queue": init_queue},
        "rollout": {"workers": rollout_workers, "queue": rollout_queue},
        "evaluate": {"workers": evaluate_workers, "queue": evaluate_queue},
    }

    patch = _patch(stages, max_sandboxes)
    async with common.connect(url, key) as client:
        _print(await client.update_node(patch), as_json)


def _patch(stages: dict[str, dict[str, int | None]], ceiling: int | None) -> NodePatch:
    from api_schemas.nodes import NodePatch

    named = {stage: figures for stage, figures in stages.items() if any(figures.values())}
    if not named and ceiling is None:
        raise common.CommandError(
            "nothing to change",
            hint="Pass at least one limit, such as --rollout-workers 64; --help lists them.",
        )
    sandboxes = {} if ceiling is None else {"sandboxes": {"ceiling": ceiling}}
    return NodePatch.model_validate(named | sandboxes)


def _print_nodes(nodes: list[NodeView], as_json: bool) -> None:
    if as_json:
        common.print_json([node.model_dump(mode="json") for node in nodes])
        return
    from rollout_service.cli.console import table

    rows = table("node", "state", "rollouts", "places", "sandboxes", "labels", "last heard of", "address")
    for node in nodes:
        figures = (node.rollouts, node.places, node.in_use, ", ".join(node.labels) or "-")
        heard = f"{node.silent_seconds:.0f} s ago"
        rows.add_row(node.node, node.state, *map(str, figures), heard, node.address or "-")
    common.out().print(rows)


def _print_limit(overview: Overview) -> None:
    from rollout_service.cli.watch.sections import limit

    line = limit(overview.bottleneck, overview.next_node)
    if line is not None:
        common.out().print(line, soft_wrap=True)


def _print(node: NodeConcurrency, as_json: bool) -> None:
    if as_json:
        common.print_json(node.model_dump(mode="json"))
        return
    from rollout_service.cli.console import table

    rows = table("stage", "workers", "working", "queue")
    for stage in ("init", "rollout", "evaluate"):
        figures = getattr(node, stage)
        rows.add_row(stage, str(figures.workers), str(figures.working), str(figures.queue))
    common.out().print(rows)
    sandboxes = node.sandboxes
    common.out().print(
        f"sandboxes on {node.node}: {sandboxes.in_use} in use, {sandboxes.waiting} waiting to start, "
        f"{sandboxes.target} allowed under the current pressure, {sandboxes.ceiling} at most",
        soft_wrap=True,
    )
