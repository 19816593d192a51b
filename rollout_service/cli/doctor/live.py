"""`rollout-service doctor --live`: the problems of a service that runs, and their causes.

Guarantee: it answers even if the service's event loop is blocked: the service's watchdog has then written its last
report to the state folder, which is read if the service does not answer within `ANSWER_SECONDS`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from rollout_service.cli import common
from rollout_service.cli.common import CommandError

if TYPE_CHECKING:
    from api_schemas.views.hangs import HangReport
    from api_schemas.views.overview import Overview
    from rollout_client.client import RolloutClient
    from rollout_service.cli.doctor.live_report import LiveReport

ANSWER_SECONDS = 4.0
STALE_SECONDS = 15.0
"""A report in the state folder that is older was left by a service that was killed."""


def check_live(
    url: str, key: str | None, state_dir: Path | None, config: Path | None, *, stacks: bool, as_json: bool
) -> int:
    """Print the problems of a service; return 1 if there are any.

    Raises:
        CommandError: The service does not answer, and there is no report in its state folder.
    """
    from rollout_service.cli.doctor import live_view

    # A service that runs again meanwhile takes its report back, and answers.
    report = _ask(url, key) or _read(state_dir, config) or _ask(url, key)
    if report is None:
        raise _nothing_to_read(url, state_dir, config)
    if as_json:
        common.print_json(report.as_dict())
    else:
        live_view.show(report, common.out(), stacks=stacks)
    return 1 if report.is_wrong else 0


def _ask(url: str, key: str | None) -> LiveReport | None:
    """Return the service's own answer, or None if none comes."""
    from rollout_client.client import UnreachableError
    from rollout_service.cli.doctor.live_report import LiveReport

    async def ask() -> tuple[HangReport, Overview]:
        async with common.connect(url, key) as client:
            return await _both(client)

    try:
        return LiveReport(*anyio.run(ask))
    except (TimeoutError, UnreachableError):
        return None


async def _both(client: RolloutClient) -> tuple[HangReport, Overview]:
    with anyio.fail_after(ANSWER_SECONDS):
        return await client.hangs(), await client.overview()


def _folder(state_dir: Path | None, config: Path | None) -> Path:
    from rollout_service.settings import load_settings

    return (state_dir or load_settings(config).state_dir).expanduser()


def _read(state_dir: Path | None, config: Path | None) -> LiveReport | None:
    """Return the report in the state folder, if it is not an old one."""
    from rollout_service.cli.doctor.live_report import LiveReport
    from rollout_service.server.hangs.heartbeat import read_last_report

    report = read_last_report(_folder(state_dir, config))
    if report is None or (datetime.now(UTC) - report.at).total_seconds() > STALE_SECONDS:
        return None
    return LiveReport(report)


def _nothing_to_read(url: str, state_dir: Path | None, config: Path | None) -> CommandError:
    from rollout_service.server.hangs.heartbeat import STACKS

    folder = _folder(state_dir, config)
    return CommandError(
        f"the service at {url} does not answer, and there is no report of the last {STALE_SECONDS:g} s in {folder}",
        hint="Is it running, and is this its state folder (--state-dir)? If its process is there, send it SIGUSR1: "
        f"it writes the stacks of all threads to {folder / STACKS}.",
    )
