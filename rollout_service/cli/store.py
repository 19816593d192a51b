"""`rollout-service store`: show what a store's shared folder or bucket lacks, and replace one that is lost for good."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson, CommandError, Config

if TYPE_CHECKING:
    from rollout_service.store.redis import RedisConnection
    from rollout_service.store.redis.lost_trajectories import FolderReport
    from rollout_service.store.segments import SegmentFiles

app = typer.Typer(
    name="store",
    help="See what a store's shared folder or bucket lacks, and begin again where it is lost.",
    no_args_is_help=True,
)

SHOWN = 20
"""The most rollouts that are named without --json."""


@app.command("check", epilog="Example: rollout-service store check --json")
@common.command
async def check(config: Config = None, as_json: AsJson = False) -> int:
    """Say which rollouts have their trajectories in files that are not in the shared folder or bucket.

    Services may be running, and nothing is changed. The exit code is 1 if anything is lost.
    """
    async with _opened(config) as shards:
        report = await _look(shards)
    _show(report, shards[0][1], as_json=as_json)
    return 1 if report.problem or report.lost else 0


@app.command("new-folder", epilog="Example: rollout-service store new-folder --yes")
@common.command
async def new_folder(
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise only say what is lost.")] = False,
    as_json: AsJson = False,
) -> int:
    """Use the folder or the objects of the settings in place of the one before, which is lost, and show what was in it.

    It may be empty, or hold the files that could be saved. Rollouts whose trajectories are lost keep their rewards;
    reading the trajectories fails with `record_lost`. Services that run go on by themselves.
    """
    from rollout_service.store.redis.lost_trajectories import begin_again

    async with _opened(config) as shards:
        report = await _look(shards)
        if yes:
            for connection, files in shards:
                await begin_again(connection, files)
            report = await _look(shards)
    _show(report, shards[0][1], as_json=as_json)
    if not yes:
        common.err().print("nothing was changed; --yes begins again with this folder")
    return 0


@asynccontextmanager
async def _opened(config: Path | None) -> AsyncIterator[Sequence[tuple[RedisConnection, SegmentFiles]]]:
    from rollout_service.settings import load_settings
    from rollout_service.store.segments.files import files_of

    settings = load_settings(config).store
    if not settings.url or (settings.folder is None and settings.objects is None):
        raise CommandError(
            "the settings name no place that services share for trajectories",
            hint="Pass the settings of a node with --config: [store] url, and folder or objects.",
        )
    from rollout_service.store.redis import RedisConfig, RedisConnection

    shards: list[tuple[RedisConnection, SegmentFiles]] = []
    async with AsyncExitStack() as stack:
        for one in RedisConfig.of(settings):
            home = shards[0][0].store_id if shards else ""
            connection = await RedisConnection.open(replace(one, home=home))
            stack.push_async_callback(connection.close)
            if (files := files_of(settings, one.shard)) is not None:
                shards.append((connection, files))
        yield shards


async def _look(shards: Sequence[tuple[RedisConnection, SegmentFiles]]) -> FolderReport:
    from rollout_service.store.redis.lost_trajectories import FolderReport, look

    found = [await look(connection, files) for connection, files in shards]
    return FolderReport(
        next((one.problem for one in found if one.problem is not None), None),
        sum(one.referenced for one in found),
        [lost for one in found for lost in one.lost],
    )


def _show(report: FolderReport, files: SegmentFiles, *, as_json: bool) -> None:
    if as_json:
        problem = None if report.problem is None else str(report.problem)
        counts = {"problem": problem, "trajectories": report.referenced, "lost": report.lost}
        common.print_json({"folder": files.texts.where} | counts)
        return
    if report.problem is not None:
        common.explain(report.problem)
    out, count = common.out(), common.count(report.referenced, "trajectory", "trajectories")
    out.print(f"{len(report.lost)} of {count} are not in {files.texts.subject}", soft_wrap=True)
    for run, lost in report.by_run().most_common():
        out.print(f"  {lost} of {'rollouts of no run' if run is None else f'run {run}'}")
    for environment, lost in report.by_environment().most_common():
        out.print(f"  {lost} of environment {environment}")
    if report.lost:
        names = ", ".join(one.rollout_id for one in report.lost[:SHOWN])
        more = " and others, which --json names" if len(report.lost) > SHOWN else ""
        out.print(f"  rollouts: {names}{more}", soft_wrap=True)
