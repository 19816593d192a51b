"""`rollout-service restore`: put a backup where nothing is yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.backup import SlurmJob, StateDir, opened_places, report
from rollout_service.cli.common import AsJson, Config
from rollout_service.cli.slurm.jobs import JOBS, Folder

EXAMPLE = "Example: rollout-service restore /backups/monday --config rollout.toml"


@common.command
def command(
    backup: Annotated[Path, typer.Argument(help="The folder of a backup.")],
    config: Config = None,
    state_dir: StateDir = None,
    job: SlurmJob = None,
    folder: Folder = JOBS,
    as_json: AsJson = False,
) -> None:
    """Restore what `rollout-service backup` has copied; start the service afterwards.

    The backup is compared with the hashes of its files first. Nothing is restored over a store, a state folder or a
    shared folder that has data.
    """
    from rollout_service.backup import restore_backup

    with common.unwound_by_signals(), opened_places(config, state_dir, job, folder, must_be_over=True) as places:
        report(restore_backup(backup.absolute(), places), backup, as_json=as_json)
