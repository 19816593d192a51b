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
STYLES = {"stuck": "bold red", "slow": "yellow", "held": "cyan"}


def check_live(
    url: str, key: str | None, state_dir: Path | None, config: Path | None, *, stacks: bool, as_json: bool
) -> int:
    """Print what is stuck, slow or held back; return 1 if something is stuck.

    Raises:
        CommandError: The service does not answer, and there is no report in its state folder.
    """
    report = _ask(url, key) or _read(url, state_dir, config)
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


def _read(url: str, state_dir: Path | None, config: Path | None) -> HangReport:
    from rollout_service.hangs.last_report import STACKS, read_last_report
    from rollout_service.settings import load_settings

    folder = (state_dir or load_settings(config).state_dir).expanduser()
    report = read_last_report(folder)
    age = None if report is None else (datetime.now(UTC) - report.at).total_seconds()
    if report is None or age is None or age > STALE_SECONDS:
        left = "there is no report" if age is None else f"the last report is {age:.0f} s old"
        raise CommandError(
            f"the service at {url} does not answer, and {left} in {folder}",
            hint="Is it running, and is this its state folder (--state-dir)? If its process is there, send it SIGUSR1: "
            f"it writes the stacks of all threads to {folder / STACKS}.",
        )
    return report


def _show(report: HangReport, console: Console, *, stacks: bool) -> None:
    from rich.text import Text

    from rollout_service.cli.console import table

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
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
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

    console.print()
    console.print(
        Text(f"{finding.verdict}: {finding.message}", style=STYLES[finding.verdict]), soft_wrap=True
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
