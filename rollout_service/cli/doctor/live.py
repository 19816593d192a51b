"""`rollout-service doctor --live`: what is stuck, slow or held back in a service that runs, and why.

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
    from rich.console import Console

    from api_schemas.views.hangs import HangFinding, HangReport

ANSWER_SECONDS = 4.0
STALE_SECONDS = 15.0
"""A report in the state folder that is older was left by a service that was killed."""


def check_live(
    url: str, key: str | None, state_dir: Path | None, config: Path | None, *, stacks: bool, as_json: bool
) -> int:
    """Print what is stuck, slow or held back; return 1 if something is stuck.

    Raises:
        CommandError: The service does not answer, and there is no report in its state folder.
    """
    # A service that runs again meanwhile takes its report back, and answers.
    report = _ask(url, key) or _read(state_dir, config) or _ask(url, key)
    if report is None:
        raise _nothing_to_read(url, state_dir, config)
    if as_json:
        common.print_json(report.model_dump(mode="json"))
    else:
        _show(report, common.out(), stacks=stacks)
    return 1 if any(one.verdict == "stuck" for one in report.findings) else 0


def _ask(url: str, key: str | None) -> HangReport | None:
    """Return the service's own answer, or None if none comes."""
    from rollout_client.client import UnreachableError

    async def ask() -> HangReport:
        async with common.connect(url, key) as client:
            with anyio.fail_after(ANSWER_SECONDS):
                return await client.hangs()

    try:
        return anyio.run(ask)
    except (TimeoutError, UnreachableError):
        return None


def _folder(state_dir: Path | None, config: Path | None) -> Path:
    from rollout_service.settings import load_settings

    return (state_dir or load_settings(config).state_dir).expanduser()


def _read(state_dir: Path | None, config: Path | None) -> HangReport | None:
    """Return the report in the state folder, if it is not an old one."""
    from rollout_service.hangs.last_report import read_last_report

    report = read_last_report(_folder(state_dir, config))
    if report is None or (datetime.now(UTC) - report.at).total_seconds() > STALE_SECONDS:
        return None
    return report


def _nothing_to_read(url: str, state_dir: Path | None, config: Path | None) -> CommandError:
    from rollout_service.hangs.last_report import STACKS

    folder = _folder(state_dir, config)
    return CommandError(
        f"the service at {url} does not answer, and there is no report of the last {STALE_SECONDS:g} s in {folder}",
        hint="Is it running, and is this its state folder (--state-dir)? If its process is there, send it SIGUSR1: "
        f"it writes the stacks of all threads to {folder / STACKS}.",
    )


def _show(report: HangReport, console: Console, *, stacks: bool) -> None:
    from rich.text import Text

    from rollout_service.cli.console import HANG_STYLES, table

    if report.source == "state_folder":
        console.print(
            f"The service does not answer; this is the report that its watchdog wrote at {report.at:%H:%M:%S} UTC."
        )
    lag = f"event loop at most {report.loop_lag_seconds:.2f} s late"
    console.print(f"node {report.node}: {common.count(report.working, 'rollout')} under way, {lag}")
    if not report.findings:
        console.print("Nothing is stuck, slow or held back.")
        return
    rows = table("verdict", "waits for", "subject", "rollouts", "seconds", "answers")
    for finding in report.findings:
        answers = {True: "yes", False: "no", None: "-"}[finding.responds]
        verdict = Text(finding.verdict, style=HANG_STYLES[finding.verdict])
        rows.add_row(
            verdict,
            finding.kind,
            finding.subject,
            str(finding.count),
            f"{finding.seconds:.0f}",
            answers,
        )
    console.print(rows)
    for finding in report.findings:
        _explain(finding, console, stacks=stacks)


def _explain(finding: HangFinding, console: Console, *, stacks: bool) -> None:
    from rich.text import Text

    from rollout_service.cli.console import HANG_STYLES

    console.print()
    console.print(
        Text(f"{finding.verdict}: {finding.message}", style=HANG_STYLES[finding.verdict]), soft_wrap=True
    )
    console.print(Text(f"  {finding.hint}"), soft_wrap=True)
    if finding.rollouts:
        more = (
            f" and {finding.count - len(finding.rollouts)} more"
            if finding.count > len(finding.rollouts)
            else ""
        )
        console.print(Text(f"  rollouts: {', '.join(finding.rollouts)}{more}"), soft_wrap=True)
    for frame in finding.stack if stacks else [frame for frame in finding.stack if frame.ours][-1:]:
        console.print(Text(f"  at {frame.file}:{frame.line} {frame.function}"), soft_wrap=True)
