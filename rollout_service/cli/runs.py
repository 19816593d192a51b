"""`rollout-service runs`: create, control and look at a running server's runs, and lease and settle their batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from api_schemas.exports import Rescored
    from api_schemas.runs import Run, RunRequest
    from api_schemas.runs.history import GroupRow, RunHistory
    from rollout_client.client import RolloutClient

app = typer.Typer(
    name="runs",
    help="Create, pause, and end runs; lease and settle their batches.",
    no_args_is_help=True,
)

PATIENCE_SECONDS = 300.0
"""How long a server may be unreachable while a command waits for it."""

RUN_HINT = (
    'A minimal run is {"source": {"kind": "dataset", "environment": "calc", "split": "train"}, '
    '"batch_size": 8}. A server\'s /docs page lists every field, under RunRequest.'
)

GroupState = Literal["open", "ready", "batched", "acknowledged", "dropped"]
RunId = Annotated[str, typer.Argument(help="The run's id, from `runs list`.", autocompletion=completion.runs)]
BatchId = Annotated[str, typer.Argument(help="The batch's id, as `runs lease` printed it.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]


def _show(runs: list[Run]) -> None:
    from api_schemas.errors import sentences
    from rollout_service.cli.console import Heading, id_column, table
    from rollout_service.cli.watch.sections import render_parallel

    names = ("state", "taken", "open", "ready", "batched", "acked", "dropped", "kept")
    rows = table(id_column("id"), *names)
    for run in runs:
        counts = run.counts
        numbers = (run.cursor, counts.open, counts.ready, counts.batched, counts.acknowledged)
        dropped = common.joined_counts(counts.dropped) or "0"
        rows.add_row(run.run_id, run.state, *map(str, numbers), dropped, _kept(run))
    common.out().print(rows if runs else "There are no runs. Create one with `rollout-service runs create FILE`.")
    for run in runs:
        if run.parallel is not None:
            common.out().print(Heading("sub-agents"))
            common.out().print(render_parallel(run.parallel))
        if run.problem is not None:
            said = sentences(run.problem.message, run.problem.hint)
            common.err().print(f"{run.run_id}: {said}", soft_wrap=True)
        for warning in run.warnings if run.ended_at is None else []:
            common.err().print(f"{run.run_id}: warning: {warning}", soft_wrap=True)


def _kept(run: Run) -> str:
    """Return the share of closed groups that were kept; the run's `acceptance_rate` is an estimate."""
    counts = run.counts
    kept = counts.ready + counts.batched + counts.acknowledged
    closed = kept + sum(counts.dropped.values())
    return f"{kept / closed:.0%}" if closed else "-"


def _show_groups(found: list[GroupRow]) -> None:
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("group"), "state", "reason", "batch", "mean", "rewards")
    for group in found:
        rewards = " ".join(_number(one.reward) for one in group.samples)
        batch = "-" if group.batch is None else str(group.batch)
        mean = _number(group.reward_mean)
        rows.add_row(str(group.number), group.state, group.reason or "-", batch, mean, rewards or "-")
    common.out().print(rows if found else "There are no such groups.")


def _show_history(found: RunHistory) -> None:
    from rollout_service.cli.console import table

    columns = (found.reward_mean, found.acceptance, found.staleness, found.turns, found.tokens, found.failed)
    rows = table("until", "groups", "reward", "kept", "stale", "turns", "tokens", "failed", "dropped")
    for place, at in enumerate(found.at):
        dropped = [f"{counts[place]} {reason}" for reason, counts in found.dropped.items() if counts[place]]
        numbers = (_number(column[place]) for column in columns)
        rows.add_row(f"{at:%Y-%m-%d %H:%M:%S}", str(found.groups[place]), *numbers, ", ".join(dropped) or "0")
    common.out().print(rows if found.at else "No group of the run has closed yet.")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


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
            runs = [await (await client.create_run(order)).view()]
        common.print_json(runs) if as_json else _show(runs)

    return common.run_coroutine(created)


@app.command("list", epilog="Example: rollout-service runs list --json")
@common.client_command(_show)
async def list_runs(client: RolloutClient) -> list[Run]:
    """Show all runs, oldest first."""
    return await client.runs()


@app.command("show", epilog="Example: rollout-service runs show dapo-7b")
@common.client_command(_show)
async def show(client: RolloutClient, run_id: RunId) -> list[Run]:
    """Show one run, and how its rollouts use sub-agents if they may have any."""
    return [await client.open_run(run_id).view(parallel=True)]


@app.command("pause", epilog="Example: rollout-service runs pause dapo-7b")
@common.client_command(_show)
async def pause(client: RolloutClient, run_id: RunId) -> list[Run]:
    """Pause a run: start no more groups, and let those under way end."""
    return [await client.open_run(run_id).pause()]


@app.command("resume", epilog="Example: rollout-service runs resume dapo-7b")
@common.client_command(_show)
async def resume(client: RolloutClient, run_id: RunId) -> list[Run]:
    """Resume a run that was paused, or that stopped because of a problem."""
    return [await client.open_run(run_id).resume()]


@app.command("end", epilog="Example: rollout-service runs end dapo-7b")
@common.client_command(_show)
async def end(client: RolloutClient, run_id: RunId) -> list[Run]:
    """End a run for good; finished groups can still be leased."""
    return [await client.open_run(run_id).end()]


@app.command("groups", epilog="Example: rollout-service runs groups dapo-7b --state dropped")
@common.client_command(_show_groups)
async def groups(
    client: RolloutClient,
    run_id: RunId,
    state: Annotated[GroupState | None, typer.Option(help="Show only groups in this state.")] = None,
    reason: Annotated[str | None, typer.Option(help="Show only groups that were dropped for this reason.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many groups to show.")] = 20,
) -> list[GroupRow]:
    """Show a run's groups, those that started last first, with the rewards of their samples."""
    return await common.first(client.open_run(run_id).groups(state=state, reason=reason), limit)


@app.command("history", epilog="Example: rollout-service runs history dapo-7b --json")
@common.client_command(_show_history)
async def history(
    client: RolloutClient,
    run_id: RunId,
    points: Annotated[int, typer.Option(min=1, max=1_000, help="The most intervals to show.")] = 20,
) -> RunHistory:
    """Show how a run went, in intervals of closed groups, the oldest first."""
    return await client.open_run(run_id).history(points=points)


@app.command("lease", epilog="Example: rollout-service runs lease dapo-7b --output batch.json --ack")
@common.client_command(patience_seconds=PATIENCE_SECONDS)
async def lease(
    client: RolloutClient,
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
) -> int:
    """Lease the next batch, write it to a file, and print its id.

    The exit code is 1 if no batch became ready in time. A batch that is not acknowledged is delivered again when its
    lease expires: settle it with --ack, or with `runs ack` or `runs nack`.
    """
    from rollout_service.cli.files import written

    _refuse_to_overwrite(output, force=force)
    arrays = output.suffix == ".safetensors"
    run = client.open_run(run_id)
    leased = await run.lease(timeout_seconds=timeout, lease_seconds=seconds, arrays=arrays)
    if leased is None:
        common.err().print(
            f"No batch became ready within {timeout:g} s. `rollout-service runs show {run_id}` shows why."
        )
        return 1
    with written(output) as write:
        write(leased.content)
    common.print_line(leased.batch_id)
    if ack:
        await leased.ack()
    else:
        _say_how_to_settle(run_id, leased.batch_id, seconds)
    return 0


@app.command("ack", epilog="Example: rollout-service runs ack dapo-7b dapo-7b.b0")
@common.client_command(patience_seconds=PATIENCE_SECONDS)
async def ack(client: RolloutClient, run_id: RunId, batch_id: BatchId) -> None:
    """Acknowledge a batch: it was trained on, and is never delivered again."""
    await _settle(client, run_id, batch_id, "ack")


@app.command("nack", epilog="Example: rollout-service runs nack dapo-7b dapo-7b.b0")
@common.client_command(patience_seconds=PATIENCE_SECONDS)
async def nack(client: RolloutClient, run_id: RunId, batch_id: BatchId) -> None:
    """Return a batch: the next lease gets it at once."""
    await _settle(client, run_id, batch_id, "nack")


@app.command("export", epilog="Example: rollout-service runs export dapo-7b --output dapo-7b.jsonl.gz")
@common.client_command(patience_seconds=PATIENCE_SECONDS)
async def export(
    client: RolloutClient,
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
) -> None:
    """Export the rollouts of a run's closed groups, with requests, trajectories, and rewards."""
    _refuse_to_overwrite(output, force=force)
    run = client.open_run(run_id)
    if atif:
        from rollout_service.cli.files import export_atif

        written, left_out = await export_atif(run, output)
        common.out().print(f"{output}: {written} written, {left_out} left out", soft_wrap=True)
        return
    try:
        size = await run.export(output)
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
            errors = []
            async for one in _rescored(client, file or what, environment, replay=replay):
                common.print_line(one.model_dump_json())
                errors.append(one.error is not None)
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
    """Rescore an exported file, or the run with this id."""
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


async def _settle(client: RolloutClient, run_id: str, batch_id: str, how: Literal["ack", "nack"]) -> None:
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
