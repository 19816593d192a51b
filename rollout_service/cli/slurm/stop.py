"""`rollout-service slurm stop`: drain a job and end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.slurm.jobs import JOBS, POLL_SECONDS, Folder, Job, find, state_of

if TYPE_CHECKING:
    from rollout_service.cluster.slurm.folder import JobFolder

EXAMPLE = "Example: rollout-service slurm stop rollouts-1a2b3c"


def command(
    job: Job = None,
    folder: Folder = JOBS,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to drain before it is cancelled.")] = 300,
    remove: Annotated[bool, typer.Option("--remove", help="Remove its folder with all results.")] = False,
) -> None:
    """Drain a job and end it; its state stays in its folder, and the work goes on if it is submitted again."""

    async def main() -> None:
        await _stop(find(job, folder), timeout, remove=remove)

    common.run(main)


async def _stop(folder: JobFolder, timeout: float, *, remove: bool) -> None:
    import shutil

    import anyio

    from rollout_service.cluster.slurm import commands

    job = folder.load().job
    state = await state_of(folder)
    if state.state in ("NOT_SUBMITTED", "UNKNOWN") and not remove:
        raise common.CommandError(
            f"this Slurm has no job {job} of {folder.path}" if job else f"{folder.path} was not submitted",
            hint=f"Name another: each job has a folder in {folder.path.parent}. --remove removes this one's.",
        )
    if state.state == "RUNNING":
        await commands.cancel(job, "--batch", "--signal=USR2")
        with anyio.move_on_after(timeout):
            while not (await commands.job_state(job)).is_over:  # noqa: ASYNC110 - Slurm announces nothing
                await anyio.sleep(POLL_SECONDS / 4)
    if job and not (await commands.job_state(job)).is_over:
        await commands.cancel(job)
    if remove:
        await anyio.to_thread.run_sync(shutil.rmtree, folder.path)
    common.print_line(f"{'removed' if remove else 'stopped'} job {job} of {folder.path}")
