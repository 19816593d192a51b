"""`rollout-service nodes`: show and change how much a running server does at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url

if TYPE_CHECKING:
    from api_schemas.nodes import NodeConcurrency, NodePatch

app = typer.Typer(name="nodes", help="Show and change how much a server does at once.", no_args_is_help=True)

Figure = Annotated[int | None, typer.Option(min=1, show_default=False)]


@app.command("show", epilog="Example: rollout-service nodes show --json")
def show(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show the workers and queues of each stage, and the sandboxes."""

    async def main() -> None:
        async with common.connect(url, key) as client:
            _print(await client.node(), as_json)

    common.run(main)


@app.command("set", epilog="Example: rollout-service nodes set --rollout-workers 64 --max-sandboxes 128")
def change(
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

    async def main() -> None:
        patch = _patch(stages, max_sandboxes)
        async with common.connect(url, key) as client:
            _print(await client.update_node(patch), as_json)

    common.run(main)


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
