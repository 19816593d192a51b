"""The commands of a job: its batch step, the service on a node, and an engine. Slurm calls them; people do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

from rollout_service.cli import common

FolderArgument = Annotated[Path, typer.Argument(help="The job's folder.")]


def run(folder: FolderArgument) -> None:
    """Run a job from its folder, within its allocation."""
    from rollout_service.cluster.slurm.supervisor import run_job

    _within_the_job(run_job, folder)


def node(
    folder: FolderArgument,
    slot: Annotated[int, typer.Option(min=0, help="The node's number in the job, which names its state.")] = 0,
) -> None:
    """Serve on this node of a job."""
    from rollout_service.cluster.slurm.node import serve_on_node

    _within_the_job(serve_on_node, folder, slot)


def engine(folder: FolderArgument) -> None:
    """Serve an engine on this node of a job."""
    from rollout_service.cluster.slurm.engine import serve_engine

    _within_the_job(serve_engine, folder)


def _within_the_job(part: Callable[..., Awaitable[int]], folder: Path, *more: int) -> None:
    """Run a part of a job, which handles its signals itself, and logs."""
    import logging

    import anyio

    from rollout_service.cluster.slurm.folder import JobFolder
    from rollout_service.observability.telemetry.logging import configure_logging
    from rollout_service.settings import LogFormat

    configure_logging(LogFormat.CONSOLE, "info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every probe
    common.run_blocking(lambda: anyio.run(part, JobFolder(folder), *more))
