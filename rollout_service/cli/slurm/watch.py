"""`rollout-service slurm status, logs, tunnel, stop`: the progress of a job, the way to it, and its end."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.base.terminal_text import escape_controls
from rollout_service.cli import common
from rollout_service.cli.common import AsJson
from rollout_service.cli.slurm.jobs import JOBS, POLL_SECONDS, Folder, Job, find, state_of

if TYPE_CHECKING:
    from rollout_service.cluster.slurm.commands import JobState
    from rollout_service.cluster.slurm.folder import JobFolder


CANCEL_SECONDS = 120.0
"""How long Slurm may take to end a job that was cancelled: it waits for `KillWait`, 30 s by default, and kills then."""


@common.command
async def status(
    job: Job = None,
    folder: Folder = JOBS,
    wait: Annotated[float, typer.Option(min=0, help="Wait so many seconds for a node that is ready.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Show a job's state, its nodes and engines, its address, and where its key is."""
    import anyio

    from rollout_service.base.errors import ConfigurationError

    found = find(job, folder)
    deadline = anyio.current_time() + wait
    state, (ready, reasons) = await state_of(found), await _ready_url(found)
    while ready is None and not state.is_over and anyio.current_time() < deadline:
        await anyio.sleep(POLL_SECONDS)
        with suppress(ConfigurationError):  # the controller is busy, or starts again
            state = await state_of(found)
        ready, reasons = await _ready_url(found)
    if as_json:
        parts = {"nodes": found.published("nodes"), "engines": found.published("engines")}
        about = {"job": state.job, "folder": found.path, "state": state.state, "reason": state.reason}
        about |= {"restarts": state.restarts, "url": ready, "key_file": found.key_file}
        common.print_json(about | parts | {"failures": found.failures()})
    else:
        _show(found, state, ready)
    # On stderr, since a shell may evaluate the line `export` of the output.
    for reason in reasons:
        common.err().print(f"not ready: {reason}", soft_wrap=True)
    return 1 if wait and ready is None else 0


def _show(folder: JobFolder, state: JobState, ready: str | None) -> None:
    common.print_line(" ".join(f"job {state.job} {state.state} {state.reason} {state.nodes}".split()))
    common.print_line(f"folder {folder.path}")
    for kind in ("node", "engine"):
        for part in folder.published(f"{kind}s"):
            common.print_line(f"{kind} {part.name} {part.url}")
    for failure in folder.failures():
        exit_code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
        reason = escape_controls(failure.reason)
        common.print_line(f"engine {failure.name} failed to start {failure.starts} times{exit_code}: {reason}")
        place = shlex.quote(str(folder.path))
        common.print_line(f"    rollout-service slurm logs {place} --part engine-{failure.name}")
    if ready is not None:
        _show_export(folder, ready)


def _show_export(folder: JobFolder, url: str) -> None:
    key = shlex.quote(str(folder.key_file))
    common.print_line(f"export ROLLOUT_URL={url} ROLLOUT_KEY=$(cat {key})")


async def _ready_url(folder: JobFolder) -> tuple[str | None, list[str]]:
    from rollout_client.client import ClientError

    reasons: list[str] = []
    for node in folder.published("nodes"):
        try:
            async with common.connect(node.url, folder.key) as client:
                readiness = await client.readiness()
        except ClientError as error:
            reasons.append(f"{node.name}: {error}")
            continue
        if readiness.ready:
            return node.url, []
        reasons += [f"{node.name}: {reason}" for reason in readiness.reasons]
    return None, reasons


@common.command
def logs(
    job: Job = None,
    folder: Folder = JOBS,
    part: Annotated[str | None, typer.Option(help="One log, such as node-n1, engines or redis.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many lines of each.")] = 50,
) -> None:
    """Print the ends of a job's logs."""
    from rollout_service.cluster.slurm.folder import last_lines

    found = sorted((find(job, folder).path / "logs").glob(f"{part or '*'}.log"))
    if not found:
        raise common.CommandError("there is no such log yet", hint="Leave out --part to see all logs.")
    for file in found:
        common.print_line(f"==> {file}")
        for line in last_lines(file, lines):
            common.print_line(line)


@common.command
async def tunnel(
    job: Job = None,
    folder: Folder = JOBS,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port on this machine's loopback.")] = 8080,
) -> None:
    """Relay a port of this machine, such as a login node, to the job, until Ctrl-C.

    From a laptop, `ssh -L 8080:127.0.0.1:8080 LOGIN` leads to that port.
    """
    import anyio

    from rollout_service.cluster.slurm.relay import relay

    found, listening = find(job, folder), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(relay, found, port, listening)
        await listening.wait()
        _show_export(found, f"http://127.0.0.1:{port}")


@common.command
async def stop(
    job: Job = None,
    folder: Folder = JOBS,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to drain before it is cancelled.")] = 300,
    remove: Annotated[bool, typer.Option("--remove", help="Remove its folder with all results.")] = False,
) -> None:
    """Drain a job and end it, with the nodes that `scale` has added.

    Its state stays in its folder, and the work goes on if it is submitted again.
    """
    import shutil

    import anyio

    from rollout_service.cluster.slurm import commands

    found = find(job, folder)
    number, state = found.load().job, await state_of(found)
    if state.state in ("NOT_SUBMITTED", "UNKNOWN") and not remove:
        raise common.CommandError(
            f"this Slurm has no job {number} of {found.path}" if number else f"{found.path} was not submitted",
            hint=f"Name another: each job has a folder in {found.path.parent}. --remove removes this one's.",
        )
    if found.more_script.exists():  # whether or not a `scale` is there to do it
        await commands.end_array(found.more_script)
    if state.state == "RUNNING":
        await commands.end(number)
        await _until_over(number, timeout)
    if number and not (await commands.job_state(number)).is_over:
        await commands.cancel(number)
        if remove and not await _until_over(number, CANCEL_SECONDS):
            raise common.CommandError(
                f"job {number} has not ended yet, so its folder is not removed", hint="Run this again later."
            )
    if remove:
        await anyio.to_thread.run_sync(shutil.rmtree, found.path)
    common.print_line(f"{'removed' if remove else 'stopped'} job {number} of {found.path}")


async def _until_over(job: str, seconds: float) -> bool:
    import anyio

    from rollout_service.cluster.slurm import commands

    with anyio.move_on_after(seconds):
        while not (await commands.job_state(job)).is_over:  # noqa: ASYNC110 - Slurm announces nothing
            await anyio.sleep(POLL_SECONDS / 4)
        return True
    return False
