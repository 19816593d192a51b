"""`rollout-service slurm submit`: make a job of the options, and submit it."""

from __future__ import annotations

import secrets
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson
from rollout_service.cli.slurm.jobs import JOBS, Folder, find, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout_service.cluster.slurm.spec import JobSpec

EXAMPLE = (
    "Example: rollout-service slurm submit --partition cpu --nodes 1 --backend http://gpu-1:30000   "
    "or, beside a trainer: rollout-service slurm submit --gpus 1 -- python train.py"
)


@common.command
async def command(
    trainer: Annotated[
        list[str] | None, typer.Argument(help="A program to run against the service; the job ends with it.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The job's name.", show_default="random")] = None,
    folder: Folder = JOBS,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the service; several share a Redis.")] = 1,
    partition: Annotated[str | None, typer.Option(help="The partition.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors of each node.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each node, such as 64G.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node.")] = 0,
    time: Annotated[str, typer.Option(help="Limit of time, after which the job is requeued.")] = "24:00:00",
    account: Annotated[str | None, typer.Option(help="The account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="The quality of service.")] = None,
    directive: Annotated[
        list[str] | None, typer.Option(help="More options of sbatch, as --name=value; may be repeated.")
    ] = None,
    drain: Annotated[int, typer.Option(min=10, help="Seconds before the end to begin to drain.")] = 120,
    backend: Annotated[list[str] | None, typer.Option(help="URL of an engine that runs elsewhere.")] = None,
    engine_command: Annotated[str | None, typer.Option(help="Command of an engine, with {host} and {port}.")] = None,
    engines_per_node: Annotated[int, typer.Option(min=1)] = 1,
    engine_nodes: Annotated[int, typer.Option(min=0, help="Nodes for engines alone; 0: the first of the service.")] = 0,
    engine_partition: str | None = None,
    engine_cpus: Annotated[int | None, typer.Option(min=1)] = None,
    engine_memory: str | None = None,
    engine_gpus: Annotated[int, typer.Option(min=0)] = 0,
    config: Annotated[Path | None, typer.Option(help="Settings file for every node.")] = None,
    serve_flag: Annotated[
        list[str] | None, typer.Option(help="More flags of `serve`, as --name=value; may be repeated.")
    ] = None,
    image: Annotated[list[str] | None, typer.Option(help="Image to build once for all nodes; may be repeated.")] = None,
    images_dir: Annotated[Path | None, typer.Option(help="Folder of images, which every node sees.")] = None,
    scratch: Annotated[Path | None, typer.Option(help="Folder on the nodes' local disks.")] = None,
    redis: Annotated[str | None, typer.Option(help="URL of a Redis that runs elsewhere.")] = None,
    redis_password_file: Path | None = None,
    redis_server: Annotated[str, typer.Option(help="Program that the job starts for several nodes.")] = "redis-server",
    joinable: Annotated[
        bool, typer.Option("--joinable", help="Start a Redis for one node too, so that others can join.")
    ] = False,
    join: Annotated[
        str | None,
        typer.Option(help="Another job whose nodes these are too: they share its Redis, key and work."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Write the job's folder with its script, and submit nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit the service as a job, and print its id, its folder and how to reach it.

    The job's folder holds its key, logs, state and addresses. A job that reaches its limit of time, or is preempted,
    drains, goes back into the queue, and resumes.
    """
    given, jobs = dict(locals()), folder.expanduser().absolute()
    given["join"] = None if join is None else joined(join, jobs)
    given |= {name: value.expanduser().absolute() for name, value in given.items() if isinstance(value, Path)}
    spec = _spec(given)
    await _submit(spec, jobs, dry_run=dry_run, write_only=write_only, as_json=as_json)


def _spec(given: dict[str, Any]) -> JobSpec:
    from rollout_service.cluster.slurm.spec import JobSpec

    names = ("nodes", "partition", "cpus", "memory", "gpus")
    values = {
        "name": given["name"] or f"rollouts-{secrets.token_hex(3)}",
        "resources": {key: given[key] for key in names} | {"directives": given["directive"] or []},
        "signal_seconds": given["drain"],
        "engines": _engines(given),
        "backends": given["backend"] or [],
        "trainer": given["trainer"] or [],
        "flags": given["serve_flag"] or [],
        "images": given["image"] or [],
        "redis_url": given["redis"],
        **{key: given[key] for key in ("time", "account", "qos", "redis_server", "joinable", "join")},
        **{key: given[key] for key in ("config", "images_dir", "scratch", "redis_password_file")},
    }
    with explaining("submit"):
        return JobSpec.model_validate(values)


def _engines(given: dict[str, Any]) -> dict[str, Any] | None:
    if given["engine_command"] is None:
        return None
    engines = {"command": given["engine_command"], "per_node": given["engines_per_node"]}
    if given["engine_nodes"]:
        names = ("nodes", "partition", "cpus", "memory", "gpus")
        engines["resources"] = {key: given[f"engine_{key}"] for key in names}
    return engines


@contextmanager
def explaining(command: str) -> Iterator[None]:
    """Explain errors in a job's specification that is made of a command's options."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'job'}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors()
        )
        hint = f"`rollout-service slurm {command} --help` lists the options."
        raise common.CommandError(problems, hint=hint) from None


def joined(job: str, jobs: Path) -> Path:
    folder = find(job, jobs)
    spec = folder.load().spec
    if spec.join is not None:
        return spec.join
    if not spec.shares_a_redis:
        raise common.CommandError(
            f"job {spec.name} cannot be joined: it keeps its state in its folder",
            hint="Submit it with several --nodes, with --joinable, or with --redis.",
        )
    if spec.engines is None and not spec.backends:
        common.err().print(
            f"Job {spec.name} was submitted without --engine-command and --backend. Its embedded engine is of no use "
            "to other nodes: register one that they reach.",
            soft_wrap=True,
        )
    return folder.path


async def _submit(spec: JobSpec, jobs: Path, *, dry_run: bool, write_only: bool, as_json: bool) -> None:
    from rollout_service.cluster.slurm import commands
    from rollout_service.cluster.slurm.folder import JobFolder, Submitted
    from rollout_service.cluster.slurm.limits import check_fits
    from rollout_service.cluster.slurm.node import check_drain
    from rollout_service.cluster.slurm.spec import render

    folder = JobFolder(jobs / spec.name)
    check_drain(spec, folder)
    script = render(spec, folder.path)
    if dry_run:
        common.print_line(script.rstrip())
        return
    if (folder.path / "job.json").exists() and folder.load().job and not (await state_of(folder)).is_over:
        raise common.CommandError(
            f"job {spec.name} is still there", hint=f"Stop it: rollout-service slurm stop {spec.name}"
        )
    if not write_only:
        check_fits(spec, await commands.partition_nodes())
    folder.create(None if spec.join is None else JobFolder(spec.join).key)
    file = folder.path / "job.sh"
    try:
        file.write_text(script)
        folder.save(Submitted(job="", spec=spec))
    except OSError as error:
        raise common.CommandError(
            f"the job's folder {folder.path} cannot be written: {error.strerror}",
            hint="Free space, or choose another folder on the shared file system with --folder.",
        ) from error
    if write_only:
        common.print_line(f"wrote {file}; submit it with sbatch, or run its last line within a job")
        return
    job = await commands.submit(file)
    folder.save(Submitted(job=job, spec=spec))
    if as_json:
        common.print_json({"job": job, "name": spec.name, "folder": str(folder.path)})
        return
    common.print_line(f"submitted job {job}, whose folder is {folder.path}")
    status = shlex.join(["rollout-service", "slurm", "status", spec.name, "--folder", str(folder.path.parent)])
    common.print_line(f"once it runs: {status}")
