"""`rollout-service slurm scale`: add nodes to a job while it waits for them, and give them back when they are idle."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_service.cli import common
from rollout_service.cli.slurm.jobs import JOBS, Folder, state_of
from rollout_service.cli.slurm.submit import explaining, joined

if TYPE_CHECKING:
    from rollout_service.cluster.slurm.spec import JobSpec

EXAMPLE = "Example: rollout-service slurm scale rollouts-1a2b3c --max 8 --partition low --time 4:00:00"
AHEAD_SECONDS = 600.0


@common.command
async def command(
    job: Annotated[str, typer.Argument(help="The job to add nodes to: its name, its folder, or its id.")],
    most: Annotated[int, typer.Option("--max", min=1, help="The most nodes to add.")],
    folder: Folder = JOBS,
    least: Annotated[int, typer.Option("--min", min=0, help="The fewest nodes to add.")] = 0,
    partition: Annotated[str | None, typer.Option(help="The partition.")] = None,
    time: Annotated[str | None, typer.Option(help="Limit of time.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory, such as 64G.")] = None,
    account: Annotated[str | None, typer.Option(help="The account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="The quality of service.")] = None,
    directive: Annotated[
        list[str] | None, typer.Option(help="More options of sbatch, as --name=value; may be repeated.")
    ] = None,
    interval: Annotated[float, typer.Option(min=1, help="Seconds between looks.")] = 15,
    grow_after: Annotated[float, typer.Option(min=0, help="Seconds that nodes must be needed.")] = 60,
    shrink_after: Annotated[float, typer.Option(min=0, help="Seconds that a node must be idle.")] = 300,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for a node to be ready.")] = 900,
    ahead: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds before its limit of time to drain a node.",
            show_default="600, or a quarter of the limit",
        ),
    ] = None,
) -> None:
    """Add nodes to a job while rollouts wait for one, and end those that are idle, until the job is over.

    Each node is a job that joins the first, at most --max of them. Ctrl-C leaves them as they are; the command can be
    started again.
    """
    given, jobs = dict(locals()), folder.expanduser().absolute()
    if least > most:
        raise common.CommandError("--min is more than --max", hint="Lower --min, or raise --max.")
    await _scale(joined(job, jobs), given)


async def _scale(home: Path, given: dict[str, Any]) -> None:
    from rollout_service.cluster.slurm import commands
    from rollout_service.cluster.slurm.folder import JobFolder
    from rollout_service.cluster.slurm.limits import check_fits
    from rollout_service.cluster.slurm.scaler import Scaler
    from rollout_service.cluster.slurm.scaling import ScaleOptions

    spec = _spec(home, given)
    options = ScaleOptions(
        given["least"],
        given["most"],
        given["grow_after"],
        given["shrink_after"],
        given["start_timeout"],
        _ahead(given["ahead"], spec.time),
        end_seconds=spec.signal_seconds + 60.0,
    )
    check_fits(spec, await commands.partition_nodes())
    if (await state_of(JobFolder(home))).state == "NOT_SUBMITTED":
        raise common.CommandError(
            f"job {home.name} has not been submitted",
            hint=f"Submit it: sbatch {shlex.quote(str(home / 'job.sh'))}",
        )
    await Scaler(JobFolder(home), spec, options, _tell, given["interval"]).run()


def _spec(home: Path, given: dict[str, Any]) -> JobSpec:
    from rollout_service.cluster.slurm.folder import JobFolder
    from rollout_service.cluster.slurm.scaler import spec_of_more
    from rollout_service.cluster.slurm.spec import JobSpec

    resources = {key: given[key] for key in ("partition", "cpus", "memory")}
    resources["directives"] = given["directive"] or []
    limits = {key: given[key] for key in ("time", "account", "qos")}
    with explaining("scale"):
        spec = spec_of_more(JobFolder(home), resources, limits)
        JobSpec.model_validate({"name": f"{spec.name}-{given['most']}"})  # the longest name of its jobs
    for slot in range(1, given["most"] + 1):
        folder = JobFolder(home.parent / f"{spec.name}-{slot}")
        if (folder.path / "job.json").exists() and folder.load().spec.join != home:
            raise common.CommandError(
                f"{folder.path} is the folder of another job", hint="Move it, or submit under another --name."
            )
    return spec


def _ahead(asked: float | None, time: str) -> float:
    """Return how many seconds before its limit of time a node is drained."""
    from rollout_service.cluster.slurm.spec import minutes_of

    minutes = minutes_of(time)
    limit = math.inf if minutes is None else minutes * 60
    if asked is not None and asked >= limit:
        raise common.CommandError(
            f"nodes that end after {time} would be drained at once", hint="Lower --ahead, or raise --time."
        )
    return min(AHEAD_SECONDS, limit / 4) if asked is None else asked


def _tell(line: str) -> None:
    from datetime import datetime

    common.print_line(f"{datetime.now():%H:%M:%S} {line}")
