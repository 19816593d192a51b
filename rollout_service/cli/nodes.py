"""`rollout-service nodes`: list and drain the nodes that share a store, say what they wait for, and change one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_service.cli import common, completion

if TYPE_CHECKING:
    from api_schemas.nodes import NodeConcurrency, NodeView
    from rollout_client.client import RolloutClient

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
STAGES = ("init", "rollout", "evaluate")


def _show_nodes(nodes: list[NodeView]) -> None:
    from rollout_service.cli.console import table

    rows = table("node", "state", "rollouts", "places", "sandboxes", "labels", "last heard of", "address")
    for node in nodes:
        figures = (node.rollouts, node.places, node.in_use, ", ".join(node.labels) or "-")
        heard = f"{node.silent_seconds:.0f} s ago"
        rows.add_row(node.node, node.state, *map(str, figures), heard, node.address or "-")
    common.out().print(rows)


def _show_concurrency(node: NodeConcurrency) -> None:
    from rollout_service.cli.console import table

    rows = table("stage", "workers", "working", "queue")
    for stage in STAGES:
        figures = getattr(node, stage)
        rows.add_row(stage, str(figures.workers), str(figures.working), str(figures.queue))
    common.out().print(rows)
    sandboxes = node.sandboxes
    common.out().print(
        f"sandboxes on {node.node}: {sandboxes.in_use} in use, {sandboxes.waiting} waiting to start, "
        f"{sandboxes.target} allowed under the current pressure, {sandboxes.ceiling} at most",
        soft_wrap=True,
    )


def _show_cluster(found: dict[str, Any]) -> None:
    from rollout_service.cli.watch.sections import limit

    _show_nodes(found["nodes"])
    line = limit(found["bottleneck"], found["next_node"])
    if line is not None:
        common.out().print(line, soft_wrap=True)


@app.command("list", epilog="Example: rollout-service nodes list --url http://node-1:8080")
@common.client_command(_show_cluster)
async def list_(client: RolloutClient) -> dict[str, Any]:
    """List the nodes that share the server's store, what they wait for, and what one more node would bring.

    Dead ones stay until they are removed or join again.
    """
    nodes, overview = await client.nodes(), await client.overview()
    return {"nodes": nodes, "bottleneck": overview.bottleneck, "next_node": overview.next_node}


@app.command("drain", epilog="Example: rollout-service nodes drain node-2")
@common.client_command(_show_nodes)
async def drain(client: RolloutClient, node: Node) -> list[NodeView]:
    """Let a node end its rollouts and begin no more, for example before maintenance. Any server can be asked."""
    return [await client.drain_node(node)]


@app.command("resume", epilog="Example: rollout-service nodes resume node-2")
@common.client_command(_show_nodes)
async def resume(client: RolloutClient, node: Node) -> list[NodeView]:
    """Let a drained node begin rollouts again."""
    return [await client.resume_node(node)]


@app.command("remove", epilog="Example: rollout-service nodes remove node-2")
@common.client_command()
async def remove(client: RolloutClient, node: Node) -> None:
    """Remove a dead node from the list."""
    await client.remove_node(node)
    common.out().print(f"removed {node}")


@app.command("show", epilog="Example: rollout-service nodes show --json")
@common.client_command(_show_concurrency)
async def show(client: RolloutClient) -> NodeConcurrency:
    """Show the workers and queues of each stage, and the sandboxes."""
    return await client.node()


@app.command("set", epilog="Example: rollout-service nodes set --rollout-workers 64 --max-sandboxes 128")
@common.client_command(_show_concurrency)
async def change(
    client: RolloutClient,
    init_workers: Figure = None,
    init_queue: Figure = None,
    rollout_workers: Figure = None,
    rollout_queue: Figure = None,
    evaluate_workers: Figure = None,
    evaluate_queue: Figure = None,
    max_sandboxes: Annotated[
        int | None, typer.Option(min=2, help="The most sandboxes alive at once.", show_default=False)
    ] = None,
) -> NodeConcurrency:
    """Change the limits until the server restarts; work under way continues.

    To make a change permanent, put it in rollout.toml.
    """
    from api_schemas.nodes import NodePatch

    given = dict(locals())
    stages = {stage: {"workers": given[f"{stage}_workers"], "queue": given[f"{stage}_queue"]} for stage in STAGES}
    changes: dict[str, Any] = {stage: figures for stage, figures in stages.items() if any(figures.values())}
    if max_sandboxes is not None:
        changes["sandboxes"] = {"ceiling": max_sandboxes}
    if not changes:
        raise common.CommandError(
            "nothing to change",
            hint="Pass at least one limit, such as --rollout-workers 64; --help lists them.",
        )
    return await client.update_node(NodePatch.model_validate(changes))
