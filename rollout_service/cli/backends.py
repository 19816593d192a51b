"""`rollout-service backends`: list, add, drain, and remove the engines of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion

if TYPE_CHECKING:
    from rich.console import RenderableType

    from api_schemas.inference import BackendView
    from rollout_client.client import RolloutClient

app = typer.Typer(name="backends", help="List, add, drain, and remove a server's engines.", no_args_is_help=True)

BackendId = Annotated[
    str,
    typer.Argument(help="The engine's id, from `backends list`.", autocompletion=completion.backends),
]


def _show(backends: list[BackendView]) -> None:
    common.out().print(
        render_backends(backends) if backends else "No engine serves. Add one with `rollout-service backends add URL`."
    )


@app.command("list", epilog="Example: rollout-service backends list --json")
@common.client_command(_show)
async def list_backends(client: RolloutClient) -> list[BackendView]:
    """Show the engines, with their state and load; if there are none, say why."""
    backends = await client.backends()
    for reason in [] if backends else (await client.readiness()).reasons:
        common.err().print(reason, soft_wrap=True)
    return backends


@app.command("add", epilog="Example: rollout-service backends add http://gpu-1:30000 --renderer qwen3")
@common.client_command(_show)
async def add(
    client: RolloutClient,
    backend_url: Annotated[str, typer.Argument(help="The URL of the engine's server.")],
    pool: Annotated[str, typer.Option(help="The pool to add it to.")] = "policy",
    kind: Annotated[
        str | None,
        typer.Option(help="sglang, vllm or a plug-in's; by default, one of the first two, as it says."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or hub name; by default, the engine's own.")] = None,
    renderer: Annotated[str, typer.Option(help="The chat format, such as qwen3.")] = "auto",
    trace: Annotated[
        bool, typer.Option("--trace", help="Tell the engine of each request's trace; it must export traces.")
    ] = False,
) -> list[BackendView]:
    """Check and register an engine; rollouts use it at once."""
    from pydantic import ValidationError

    from api_schemas.inference import BackendSpec
    from rollout_service.base.validation import describe_problems

    values = {"url": backend_url, "pool": pool, "kind": kind, "tokenizer": tokenizer}
    try:
        spec = BackendSpec.model_validate(values | {"renderer": renderer, "trace": trace})
    except ValidationError as error:
        raise common.CommandError("\n".join(describe_problems(error, BackendSpec))) from error
    return [await client.add_backend(spec)]


@app.command("remove", epilog="Example: rollout-service backends remove b-1")
@common.client_command()
async def remove(client: RolloutClient, backend_id: BackendId) -> None:
    """Remove an engine at once; its requests continue on other engines."""
    await client.remove_backend(backend_id)
    common.err().print(f"removed {backend_id}")


@app.command("drain", epilog="Example: rollout-service backends drain b-1")
@common.client_command(_show)
async def drain(client: RolloutClient, backend_id: BackendId) -> list[BackendView]:
    """Send an engine no new requests; it finishes those it has."""
    return [await client.drain_backend(backend_id)]


def render_backends(backends: list[BackendView]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from rollout_service.cli.console import id_column, table

    rows = table(id_column("id"), "state", "version", "in flight", "served", "failures")
    for backend in backends:
        counts = (backend.weight_version, backend.in_flight, backend.served, backend.failures)
        rows.add_row(backend.backend_id, backend.state, *map(str, counts))
    errors = (f"{one.backend_id}: {one.last_error}" for one in backends if one.last_error)
    return Group(rows, *(Text(error, style="red") for error in errors))
