"""`rollout-service runs`: standing orders of a running server, and their batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout_service.cli import common
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from api_schemas.exports import Rescored
    from api_schemas.runs import Run, RunRequest
    from rollout_service.client import ClientRun

app = typer.Typer(name="runs", help="Create, list, pause, resume and end runs.", no_args_is_help=True)

PATIENCE_SECONDS = 300.0
"""How long a server may be gone while a batch is waited for."""

RunId = Annotated[str, typer.Argument(help="As `runs list` shows it.")]


@app.command("create", epilog="Example: rollout-service runs create run.json --json")
def create(
    request: Annotated[
        Path,
        typer.Argument(help="JSON: a RunRequest (source, batch_size, ...).", exists=True, dir_okay=False),
    ],
    run_id: Annotated[str | None, typer.Option(help="Instead of the one in the file.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Create a run; the same again under the same id changes nothing."""

    async def main() -> None:
        async with common.connect(url, key) as client:
            run = await client.create_run(_read(request, run_id))
            _show([await run.view()], as_json)

    common.run(main)


@app.command("list", epilog="Example: rollout-service runs list --json")
def list_runs(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show all runs, oldest first."""

    async def main() -> None:
        async with common.connect(url, key) as client:
            _show(await client.runs(), as_json)

    common.run(main)


@app.command("show", epilog="Example: rollout-service runs show dapo-7b")
def show(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show a run."""
    _change(run_id, url, key, as_json, lambda run: run.view())


@app.command("pause", epilog="Example: rollout-service runs pause dapo-7b")
def pause(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Begin no more groups; those under way end."""
    _change(run_id, url, key, as_json, lambda run: run.pause())


@app.command("resume", epilog="Example: rollout-service runs resume dapo-7b")
def resume(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Begin groups again, also after a problem."""
    _change(run_id, url, key, as_json, lambda run: run.resume())


@app.command("end", epilog="Example: rollout-service runs end dapo-7b")
def end(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """End a run for good; what is finished can still be leased."""
    _change(run_id, url, key, as_json, lambda run: run.end())


@app.command("lease", epilog="Example: rollout-service runs lease dapo-7b --output batch.json --ack")
def lease(
    run_id: RunId,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Where the batch goes: arrays if it ends in .safetensors, or JSON."
        ),
    ],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for a batch.")] = 3_600.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long the batch is leased.")] = 600.0,
    ack: Annotated[bool, typer.Option(help="Acknowledge it once it is in the file.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Lease the next batch into a file, and print its id; exit code 1 when there was none in time."""
    arrays = output.suffix == ".safetensors"

    async def main() -> int:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            run = client.open_run(run_id)
            leased = await run.lease(timeout_seconds=timeout, lease_seconds=seconds, arrays=arrays)
            if leased is None:
                common.err().print(f"no batch within {timeout:g} s")
                return 1
            _write(output, leased.content)
            if ack:
                await leased.ack()
            typer.echo(leased.batch_id)
            return 0

    common.run(main)


@app.command("export", epilog="Example: rollout-service runs export dapo-7b --output dapo-7b.jsonl.gz")
def export(
    run_id: RunId,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="JSON Lines, compressed when the name ends in .gz."),
    ],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Write all rollouts of a run's closed groups to a file, with requests, trajectories and rewards."""

    async def main() -> None:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            try:
                size = await client.open_run(run_id).export(output)
            except OSError as error:
                raise common.CommandError(str(error), hint="name another file with --output.") from error
            typer.echo(f"{output}: {size} bytes")

    common.run(main)


@app.command("rescore", epilog="Example: rollout-service runs rescore dapo-7b.jsonl.gz --environment math-v2")
def rescore(
    what: Annotated[str, typer.Argument(help="A run's id, or a file that `runs export` wrote.")],
    environment: Annotated[str | None, typer.Option(help="Evaluate by this one instead.")] = None,
    always: Annotated[
        bool, typer.Option("--always-replay", help="Repeat the tool calls even where only the answer counts.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Evaluate rollouts again without inference: a JSON object a line, with the old and the new reward."""
    from rollout_service.client_export import BadExportError, RunExport

    replay: Literal["needed", "always"] = "always" if always else "needed"
    file = Path(what) if Path(what).is_file() else None

    async def main() -> int:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            errors = 0
            try:
                if file is not None:
                    samples = RunExport(file).samples()
                    async for one in client.rescore(samples, environment=environment, replay=replay):
                        errors += _print_line(one)
                else:
                    run = client.open_run(what)
                    for one in await run.rescore(environment=environment, replay=replay):
                        errors += _print_line(one)
            except BadExportError as error:
                raise common.CommandError(str(error), hint="export the run again.") from error
            return 1 if errors else 0

    common.run(main)


def _print_line(result: Rescored) -> bool:
    typer.echo(result.model_dump_json())
    return result.error is not None


def _write(path: Path, content: bytes | bytearray) -> None:
    """Write a file that is whole or not there."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise common.CommandError(str(error), hint="name another file with --output.") from error


def _read(path: Path, run_id: str | None) -> RunRequest:
    from pydantic import ValidationError

    from api_schemas.runs import RunRequest

    try:
        request = RunRequest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or str(path)
        raise common.CommandError(
            f"{where}: {first['msg']}", hint="docs/runs.md lists the fields."
        ) from error
    return request if run_id is None else request.model_copy(update={"run_id": run_id})


def _change(
    run_id: str, url: str, key: str | None, as_json: bool, change: Callable[[ClientRun], Awaitable[Run]]
) -> None:
    async def main() -> None:
        async with common.connect(url, key) as client:
            _show([await change(client.open_run(run_id))], as_json)

    common.run(main)


def _show(runs: list[Run], as_json: bool) -> None:
    if as_json:
        common.print_json([run.model_dump(mode="json") for run in runs])
        return
    from rich.table import Column, Table

    table = Table(
        Column("id", no_wrap=True, overflow="ignore"),
        *("state", "tasks taken", "open", "ready", "batched", "acknowledged", "dropped", "accepted"),
        box=None,
    )
    for run in runs:
        counts = run.counts
        numbers = (run.cursor, counts.open, counts.ready, counts.batched, counts.acknowledged)
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
        table.add_row(run.run_id, run.state, *map(str, numbers), dropped or "0", f"{run.acceptance_rate:.0%}")
    common.out().print(table if runs else "there is no run")
    for run in runs:
        if run.problem is not None:
            common.err().print(f"{run.run_id}: {run.problem.message}. {run.problem.hint}", markup=False)
