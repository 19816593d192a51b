"""The folders of jobs, as the commands find them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common

if TYPE_CHECKING:
    from rollout_service.cluster.slurm.commands import JobState
    from rollout_service.cluster.slurm.folder import JobFolder

JOBS = Path("~/rollout-jobs")
POLL_SECONDS = 1.0
Folder = Annotated[Path, typer.Option("--folder", help="Folder of all jobs, which every node sees.")]
Job = Annotated[str | None, typer.Argument(help="A job's name, its folder, or its id; by default, the newest.")]


def find(job: str | None, jobs: Path) -> JobFolder:
    from rollout_service.cluster.slurm.folder import JobFolder

    root = jobs.expanduser().absolute()
    known = sorted(root.glob("*/job.json"), key=lambda file: file.stat().st_mtime)
    if job is not None:
        named = [file for file in (Path(job).absolute() / "job.json", root / job / "job.json") if file.exists()]
        known = named or [file for file in known if _has_id(JobFolder(file.parent), job)]
    if not known:
        raise common.CommandError(
            f"there is no job {job} in {root}" if job else f"there is no job in {root}",
            hint="Name the folder that it was submitted with: --folder.",
        )
    return JobFolder(known[-1].parent)


def _has_id(folder: JobFolder, job: str) -> bool:
    from rollout_service.base.errors import ConfigurationError

    try:
        return folder.load().job == job
    except ConfigurationError:  # such as that of a later release; it may be another job's
        return False


async def state_of(folder: JobFolder) -> JobState:
    from rollout_service.cluster.slurm import commands

    job = folder.load().job
    return await commands.job_state(job) if job else commands.JobState("", "NOT_SUBMITTED")
