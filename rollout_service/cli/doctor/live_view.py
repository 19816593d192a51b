"""`doctor --live` as text: the problems first, and then where each rollout waits.

Guarantee: it says that all is well only if the exit code does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rollout_service.cli.common import count
from rollout_service.cli.console import HANG_STYLES, id_column, table
from rollout_service.cli.doctor.live_report import LiveReport

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from api_schemas.views.hangs import HangFinding, StageWait
    from api_schemas.views.overview import Overview

GIBIBYTE = 1 << 30


def show(report: LiveReport, console: Console, *, stacks: bool) -> None:
    """Print a report."""
    for part in _head(report):
        console.print(part, soft_wrap=True)
    if report.overview is not None:
        for part in _service(report, report.overview):
            console.print(part, soft_wrap=True)
    if report.hangs.oldest:
        console.print(_waits(report.hangs.oldest))
    if not report.hangs.findings:
        if not report.is_wrong:
            console.print("Nothing is stuck, slow or held back.")
        return
    console.print(_findings(report.hangs.findings))
    for finding in report.hangs.findings:
        _explain(finding, console, stacks=stacks)


def _head(report: LiveReport) -> Iterator[RenderableType]:
    hangs, overview = report.hangs, report.overview
    if hangs.source == "state_folder":
        yield f"The service does not answer; this is the report that its watchdog wrote at {hangs.at:%H:%M:%S} UTC."
    state = "" if overview is None else "ready, " if overview.ready else "takes no work, "
    lag = f"event loop at most {hangs.loop_lag_seconds:.2f} s late"
    yield f"node {hangs.node}: {state}{count(hangs.working, 'rollout')} under way, {lag}"


def _service(report: LiveReport, overview: Overview) -> Iterator[RenderableType]:
    for reason in overview.reasons:
        yield Text(f"not ready: {reason}", "bold red")
    for warning in overview.warnings:
        yield Text(f"warning: {warning}", "yellow")
    for view in report.failing():
        seconds = (
            "" if view.failed_at is None else f", the last {(report.hangs.at - view.failed_at).seconds} s ago"
        )
        because = f": {view.last_error}" if view.last_error else ""
        yield Text(
            f"engine {view.backend_id} is {view.state}, {view.failures} failures{seconds}{because}", "red"
        )
    for group in overview.errors:
        stage = f" in {group.stage}" if group.stage else ""
        failed = f"{count(group.count, 'rollout')} failed with {group.code} ({group.boundary}{stage})"
        yield Text(f"{failed}: {group.message}")
        if group.hint:
            yield Text(f"  {group.hint}")
    for hold in report.holds():
        yield Text(f"no further sandbox is started: {hold.reason}", "cyan")
    if disks := report.disks():
        yield "free: " + ", ".join(f"{free / GIBIBYTE:.1f} GiB at {where}" for where, free in disks.items())


def _waits(oldest: list[StageWait]) -> RenderableType:
    rows = table("stage", "oldest wait", "for", "seconds", "no progress for", id_column("rollout"))
    for one in oldest:
        seconds, quiet = f"{one.seconds:.0f}", f"{one.quiet_seconds:.0f}"
        rows.add_row(one.stage, one.kind, one.name, seconds, quiet, one.rollout_id)
    return rows


def _findings(findings: list[HangFinding]) -> RenderableType:
    rows = table("verdict", "waits for", "subject", "rollouts", "seconds", "answers")
    for finding in findings:
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
    return rows


def _explain(finding: HangFinding, console: Console, *, stacks: bool) -> None:
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
