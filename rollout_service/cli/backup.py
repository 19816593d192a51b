"""`rollout-service backup`: copy all that a service would miss, while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson, CommandError, Config
from rollout_service.cli.slurm.jobs import JOBS, Folder

if TYPE_CHECKING:
    from rollout_service.backup import Manifest, Places

EXAMPLE = "Example: rollout-service backup /backups/monday --config rollout.toml"
StateDir = Annotated[Path | None, typer.Option(help="State folder, in place of the settings'.")]
SlurmJob = Annotated[str | None, typer.Option(help="A job of Slurm, by name, folder or id, in place of the settings.")]


@common.command
def command(
    target: Annotated[Path, typer.Argument(help="A new folder for the backup.")],
    config: Config = None,
    state_dir: StateDir = None,
    node_only: Annotated[
        bool, typer.Option("--node-only", help="Leave out what nodes share: another node's backup has it.")
    ] = False,
    job: SlurmJob = None,
    folder: Folder = JOBS,
    as_json: AsJson = False,
) -> None:
    """Copy the store, live sessions, the users' salt, canaries and engines, as they are at one moment.

    The service may run. Run this on its machine, as its user. Restore the copy with `rollout-service restore`.
    """
    from rollout_service.backup import make_backup

    with common.unwound_by_signals(), opened_places(config, state_dir, job, folder, with_store=not node_only) as places:
        report(make_backup(places, target.absolute()), target, as_json=as_json)


@contextmanager
def opened_places(
    config: Path | None,
    state_dir: Path | None,
    job: str | None,
    folder: Path,
    *,
    with_store: bool = True,
    must_be_over: bool = False,
) -> Iterator[Places]:
    if job is None:
        from rollout_service.backup import Places
        from rollout_service.settings import load_settings

        settings = load_settings(config, **({} if state_dir is None else {"state_dir": state_dir}))
        yield Places.of(settings, with_store=with_store)
        return
    import anyio

    from rollout_service.backup.slurm_jobs import job_places
    from rollout_service.cli.slurm.jobs import find, state_of

    found = find(job, folder)
    state = anyio.run(state_of, found)
    is_running = state.state == "RUNNING"
    if not (state.is_over or state.state == "NOT_SUBMITTED" or (is_running and not must_be_over)):
        stop = "End it first: rollout-service slurm stop."
        raise CommandError(
            f"job {job} is {state.state}", hint=stop if must_be_over else "Wait until it runs, or end it."
        )
    with job_places(found, is_running=is_running) as places:
        yield places


def report(manifest: Manifest, where: Path, *, as_json: bool) -> None:
    if as_json:
        common.print_json(manifest.model_dump(mode="json", exclude={"files"}) | {"bytes": manifest.bytes})
        return
    counts = ", ".join(f"{count} {what}" for what, count in manifest.counts.items())
    common.out().print(
        f"{where}: {counts}, as of {manifest.at:%Y-%m-%d %H:%M:%S} UTC, {manifest.bytes / 1e6:.1f} MB",
        soft_wrap=True,
    )
