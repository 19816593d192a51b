"""`rollout-service runs`: create and control a running server's runs, and lease and settle their batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout_service.cli import common, completion, run_lists
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url
from rollout_service.cli.run_lists import RunId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from api_schemas.exports import Rescored
    from api_schemas.rollouts.figures import RunParallel
    from api_schemas.runs import Run, RunRequest
    from rollout_client.client import ClientRun, RolloutClient

app = typer.Typer(
    name="runs",
    help="Create, pause, and end runs; lease and settle their batches.",
    no_args_is_help=True,
)
run_lists.register(app)

PATIENCE_SECONDS = 300.0
"""How long a server may be unreachable while a command waits for it."""

RUN_HINT = (
    'A minimal run is {"source": {"kind": "dataset", "environment": "calc", "split": "train"}, '
    '"batch_size": 8}. A server\'s /docs page lists every field, under RunRequest.'
)

BatchId = Annotated[str, typer.Argument(help="The batch's id, as `runs lease` printed it.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]


@app.command("create", epilog="Example: rollout-service runs create run.json --json")
@common.command
def create(
    request: Annotated[
        Path,
        typer.Argument(
            help="JSON file with a RunRequest (source, batch_size, ...); - reads standard input.",
            dir_okay=False,
        ),
    ],
    run_id: Annotated[str | None, typer.Option(help="The run's id, instead of the one in the file.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int | None:
    """Create a run; repeating the command with the same id and file changes nothing."""
    order = _read(request, run_id)

    async def created() -> None:
        async with common.connect(url, key) as client:
            run = await client.create_run(order)
            _show([await run.view()], as_json)

    return common.run_coroutine(created)


@app.command("list", epilog="Example: rollout-service runs list --json")
@common.command
async def list_runs(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show all runs, oldest first."""
    async with common.connect(url, key) as client:
        _show(await client.runs(), as_json)


@app.command("show", epilog="Example: rollout-service runs show dapo-7b")
def show(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show one run, and how its rollouts use sub-agents if they may have any."""
    _change(run_id, url, key, as_json, lambda run: run.view(parallel=True))


@app.command("pause", epilog="Example: rollout-service runs pause dapo-7b")
def pause(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Pause a run: start no more groups, and let those under way end."""
    _change(run_id, url, key, as_json, lambda run: run.pause())


@app.command("resume", epilog="Example: rollout-service runs resume dapo-7b")
def resume(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Resume a run that was paused, or that stopped because of a problem."""
    _change(run_id, url, key, as_json, lambda run: run.resume())


@app.command("end", epilog="Example: rollout-service runs end dapo-7b")
def end(run_id: RunId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """End a run for good; finished groups can still be leased."""
    _change(run_id, url, key, as_json, lambda run: run.end())


@app.command("lease", epilog="Example: rollout-service runs lease dapo-7b --output batch.json --ack")
@common.command
async def lease(
    run_id: RunId,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File for the batch: arrays if its name ends in .safetensors, otherwise JSON.",
        ),
    ],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for a batch.")] = 3_600.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds that the batch is leased for.")] = 600.0,
    ack: Annotated[bool, typer.Option(help="Acknowledge the batch once it is written.")] = False,
    force: Force = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> int:
    """Lease the next batch, write it to a file, and print its id.

    The exit code is 1 if no batch became ready in time. A batch that is not acknowledged is delivered again when its
    lease expires: settle it with --ack, or with `runs ack` or `runs nack`.
    """
    arrays = output.suffix == ".safetensors"

    _refuse_to_overwrite(output, force=force)
    async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
        run = client.open_run(run_id)
        leased = await run.lease(timeout_seconds=timeout, lease_seconds=seconds, arrays=arrays)
        if leased is None:
            common.err().print(
                f"No batch became ready within {timeout:g} s. `rollout-service runs show {run_id}` shows why."
            )
            return 1
        _write(output, leased.content)
        common.print_line(leased.batch_id)
        if ack:
            await leased.ack()
        else:
            _say_how_to_settle(run_id, leased.batch_id, seconds)
        return 0


@app.command("ack", epilog="Example: rollout-service runs ack dapo-7b dapo-7b.b0")
def ack(run_id: RunId, batch_id: BatchId, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Acknowledge a batch: it was trained on, and is never delivered again."""
    _settle(run_id, batch_id, "ack", url, key)


@app.command("nack", epilog="Example: rollout-service runs nack dapo-7b dapo-7b.b0")
def nack(run_id: RunId, batch_id: BatchId, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Return a batch: the next lease gets it at once."""
    _settle(run_id, batch_id, "nack", url, key)


@app.command("export", epilog="Example: rollout-service runs export dapo-7b --output dapo-7b.jsonl.gz")
@common.command
async def export(
    run_id: RunId,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="File for the JSON Lines; compressed if its name ends in .gz."),
    ],
    atif: Annotated[
        bool,
        typer.Option("--atif", help="Write a trajectory per line in ATIF 1.8, the format of Harbor's tools."),
    ] = False,
    force: Force = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Export the rollouts of a run's closed groups, with requests, trajectories, and rewards."""
    _refuse_to_overwrite(output, force=force)
    if atif:
        from rollout_service.cli.atif import export_atif

        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            written, left_out = await export_atif(client.open_run(run_id), output)
        common.out().print(f"{output}: {written} written, {left_out} left out", soft_wrap=True)
        return
    async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
        try:
            size = await client.open_run(run_id).export(output)
        except OSError as error:
            raise common.CommandError(str(error), hint="Name another file with --output.") from error
        common.out().print(f"{output}: {size} bytes", soft_wrap=True)


@app.command("rescore", epilog="Example: rollout-service runs rescore dapo-7b.jsonl.gz --environment math-v2")
@common.command
def rescore(
    what: Annotated[
        str,
        typer.Argument(
            help="A run's id, or a file (or pipe) that `runs export` wrote.", autocompletion=completion.runs
        ),
    ],
    environment: Annotated[
        str | None,
        typer.Option(help="Evaluate with this environment instead.", autocompletion=completion.environments),
    ] = None,
    always: Annotated[
        bool, typer.Option("--always-replay", help="Replay the tool calls even if only the answer is scored.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> int | None:
    """Evaluate rollouts again without inference, and print the old and new rewards, one JSON object per line.

    The exit code is 1 if a rollout could not be evaluated, or if there was none.
    """
    from rollout_service.cli.submit.files import STDIN, reread

    replay: Literal["needed", "always"] = "always" if always else "needed"

    async def rescored(file: Path | None) -> int:
        async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
            errors = [
                _print_line(one) async for one in _rescored(client, file or what, environment, replay=replay)
            ]
        if not errors:
            common.err().print("Nothing was evaluated: there are no rollouts in closed groups.")
        return 0 if errors and not any(errors) else 1

    path = Path(what)
    if what != STDIN and (path.is_dir() or not path.exists()):
        return common.run_coroutine(lambda: rescored(None))
    with reread(path) as file:
        return common.run_coroutine(lambda: rescored(file))


async def _rescored(
    client: RolloutClient,
    what: Path | str,
    environment: str | None,
    *,
    replay: Literal["needed", "always"],
) -> AsyncIterator[Rescored]:
    """Yield the results for an exported file, or for the run with this id."""
    from rollout_client.run_export import BadExportError, RunExport

    if isinstance(what, str):
        for one in await client.open_run(what).rescore(environment=environment, replay=replay):
            yield one
        return
    try:
        samples = RunExport(what).samples()
        async for one in client.rescore(samples, environment=environment, replay=replay):
            yield one
    except BadExportError as error:
        raise common.CommandError(str(error), hint="Export the run again.") from error


def _print_line(result: Rescored) -> bool:
    common.print_line(result.model_dump_json())
    return result.error is not None


@common.command
async def _settle(run_id: str, batch_id: str, how: Literal["ack", "nack"], url: str, key: str | None) -> None:
    async with common.connect(url, key, patience_seconds=PATIENCE_SECONDS) as client:
        answer = await client.open_run(run_id).settle(batch_id, how)
    common.err().print(f"{answer.batch_id}: {answer.state}", soft_wrap=True)


def _say_how_to_settle(run_id: str, batch_id: str, seconds: float) -> None:
    console = common.err()
    console.print(f"Leased for {seconds:g} s; then it is delivered again. Once you have trained on it, run:")
    console.print(f"  rollout-service runs ack {run_id} {batch_id}", soft_wrap=True)


def _refuse_to_overwrite(path: Path, *, force: bool) -> None:
    """Check that a file does not exist: it may hold data that the server no longer has."""
    if path.exists() and not force:
        hint = "Name another file with --output, or pass --force to overwrite it."
        raise common.CommandError(f"{path} already exists", hint=hint)


def _write(path: Path, content: bytes | bytearray) -> None:
    """Write a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise common.CommandError(str(error), hint="Name another file with --output.") from error


def _read(path: Path, run_id: str | None) -> RunRequest:
    from pydantic import ValidationError

    from api_schemas.runs import RunRequest
    from rollout_service.base.validation import describe_problems
    from rollout_service.cli.submit.files import read_whole

    try:
        request = RunRequest.model_validate_json(read_whole(path))
    except ValidationError as error:
        lines = (f"{path}: {line}" for line in describe_problems(error, RunRequest))
        raise common.CommandError("\n".join(lines), hint=RUN_HINT) from error
    return request if run_id is None else request.model_copy(update={"run_id": run_id})


@common.command
async def _change(
    run_id: str, url: str, key: str | None, as_json: bool, change: Callable[[ClientRun], Awaitable[Run]]
) -> None:
    async with common.connect(url, key) as client:
        _show([await change(client.open_run(run_id))], as_json)


def _show(runs: list[Run], as_json: bool) -> None:
    if as_json:
        common.print_json([run.model_dump(mode="json") for run in runs])
        return
    from api_schemas.errors import sentences
    from rollout_service.cli.console import id_column, table

    names = ("state", "taken", "open", "ready", "batched", "acked", "dropped", "kept")
    rows = table(id_column("id"), *names)
    for run in runs:
        counts = run.counts
        numbers = (run.cursor, counts.open, counts.ready, counts.batched, counts.acknowledged)
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
        rows.add_row(run.run_id, run.state, *map(str, numbers), dropped or "0", _kept(run))
    common.out().print(
        rows if runs else "There are no runs. Create one with `rollout-service runs create FILE`."
    )
    for run in runs:
        if run.parallel is not None:
            _show_parallel(run.parallel)
        if run.problem is not None:
            said = sentences(run.problem.message, run.problem.hint)
            common.err().print(f"{run.run_id}: {said}", soft_wrap=True)
        for warning in run.warnings if run.ended_at is None else []:
            common.err().print(f"{run.run_id}: warning: {warning}", soft_wrap=True)


def _show_parallel(parallel: RunParallel) -> None:
    from rollout_service.cli.console import Heading
    from rollout_service.cli.watch.sections import render_parallel

    common.out().print(Heading("sub-agents"))
    common.out().print(render_parallel(parallel))


def _kept(run: Run) -> str:
    """Return the share of closed groups that were kept; the run's `acceptance_rate` is an estimate."""
    counts = run.counts
    kept = counts.ready + counts.batched + counts.acknowledged
    closed = kept + sum(counts.dropped.values())
    return f"{kept / closed:.0%}" if closed else "-"
