"""`rollout-service doctor --live`: the problems of a running service, and their causes.

It says that all is well exactly if there is nothing that a person on call has to look at. It answers even if the
service's event loop is blocked: if the service does not answer within `ANSWER_SECONDS`, the report that its watchdog
wrote to the state folder is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console, RenderableType
from rich.text import Text

from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import HoldView
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangFinding, HangReport, HangVerdict, StageWait
from api_schemas.views.overview import Overview
from rollout_client.client import UnreachableError
from rollout_service.cli import common
from rollout_service.cli.common import CommandError, count
from rollout_service.cli.console import HANG_STYLES, id_column, table
from rollout_service.server.hangs.heartbeat import STACKS, read_last_report
from rollout_service.settings import load_settings

FLAPPING = timedelta(minutes=5)
"""How long the failure of an engine that serves again is shown; errors are kept as long."""
FRESH = timedelta(minutes=1)
"""How long a failure counts as a present one."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    hangs: HangReport
    overview: Overview | None = None
    """None if the service does not answer."""

    @property
    def is_wrong(self) -> bool:
        """Whether a person has to look at something."""
        if any(map(is_wrong, self.hangs.findings)):
            return True
        return self.overview is not None and (
            not self.overview.ready
            or bool(self.overview.warnings)
            or any(self._is_failing(view) for view in self._backends())
            or any(hold.resource == "disk" for hold in self.holds())
            or _mostly_fails(self.overview.outcomes)
        )

    def failing(self) -> list[BackendView]:
        return [view for view in self._backends() if self._is_failing(view, FLAPPING)]

    def _is_failing(self, view: BackendView, within: timedelta = FRESH) -> bool:
        has_failed = view.failed_at is not None and self.hangs.at - view.failed_at < within
        return has_failed or view.state is BackendState.FAILED

    def _backends(self) -> list[BackendView]:
        return [] if self.overview is None else [one.backend for one in self.overview.backends]

    def holds(self) -> list[HoldView]:
        return [] if self.overview is None else [hold for node in self.overview.nodes for hold in node.holds]

    def disks(self) -> dict[str, int]:
        """Return the free bytes of the nodes' file systems, by node and folder."""
        nodes = [] if self.overview is None else self.overview.nodes
        return {
            f"{node.node}:{folder}": free
            for node in nodes
            if node.pressure is not None
            for folder, free in node.pressure.disk_free_bytes.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the report of hangs with `wrong` and `service`, which is None if the service does not answer."""
        service = None
        if self.overview is not None:
            service = self.overview.model_dump(include={"ready", "reasons", "warnings", "outcomes", "errors"})
            service |= {"engines": self.failing(), "holds": self.holds(), "disk_free_bytes": self.disks()}
        return self.hangs.model_dump() | {"wrong": self.is_wrong, "service": service}


def _mostly_fails(outcomes: dict[str, int]) -> bool:
    completed = outcomes.get(RolloutState.COMPLETED, 0)
    return sum(outcomes.values()) - outcomes.get(RolloutState.CANCELLED, 0) > 2 * completed


def is_wrong(finding: HangFinding) -> bool:
    """Return whether a finding needs a person: not if it moves, is meant to wait, or may be a command that sleeps."""
    if finding.verdict is HangVerdict.IDLE:
        return finding.kind is StepKind.GRADER
    return finding.verdict is HangVerdict.STUCK or finding.kind not in tuple(StepKind)


GIBIBYTE = 1 << 30


def show(report: LiveReport, console: Console, *, stacks: bool) -> None:
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
        said = f"engine {view.backend_id} is {view.state}, {view.failures} failures"
        if view.failed_at is not None:
            # The report of hangs is made before the view of the engine.
            said += f", the last {max(0, int((report.hangs.at - view.failed_at).total_seconds()))} s ago"
        yield Text(f"{said}: {view.last_error}" if view.last_error else said, "red")
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
        about = (finding.kind, finding.subject, str(finding.count), f"{finding.seconds:.0f}", answers)
        rows.add_row(verdict, *about)
    return rows


def _explain(finding: HangFinding, console: Console, *, stacks: bool) -> None:
    said = Text(f"{finding.verdict}: {finding.message}", style=HANG_STYLES[finding.verdict])
    console.print()
    console.print(said, soft_wrap=True)
    console.print(Text(f"  {finding.hint}"), soft_wrap=True)
    if finding.rollouts:
        others = finding.count - len(finding.rollouts)
        more = f" and {others} more" if others > 0 else ""
        console.print(Text(f"  rollouts: {', '.join(finding.rollouts)}{more}"), soft_wrap=True)
    for frame in finding.stack if stacks else [frame for frame in finding.stack if frame.ours][-1:]:
        console.print(Text(f"  at {frame.file}:{frame.line} {frame.function}"), soft_wrap=True)


ANSWER_SECONDS = 4.0
STALE_SECONDS = 15.0
"""An older report in the state folder was left by a service that was killed."""


def check_live(
    url: str, key: str | None, state_dir: Path | None, config: Path | None, *, stacks: bool, as_json: bool
) -> int:
    """Print the problems of a service; return 1 if there are any."""
    report = _ask(url, key)
    if report is None:
        folder = (state_dir or load_settings(config).state_dir).expanduser()
        # A service that has recovered removes its report, and answers.
        report = _read(folder) or _ask(url, key)
    if report is None:
        raise CommandError(
            f"the service at {url} does not answer, and there is no report from the last {STALE_SECONDS:g} s "
            f"in {folder}",
            hint="Is it running, and is this its state folder (--state-dir)? If its process is there, send it "
            f"SIGUSR1: it writes the stacks of all threads to {folder / STACKS}.",
        )
    common.print_json(report.as_dict()) if as_json else show(report, common.out(), stacks=stacks)
    return 1 if report.is_wrong else 0


def _ask(url: str, key: str | None) -> LiveReport | None:
    async def ask() -> LiveReport:
        async with common.connect(url, key) as client:
            with anyio.fail_after(ANSWER_SECONDS):
                return LiveReport(await client.hangs(), await client.overview())

    try:
        return anyio.run(ask)
    except (TimeoutError, UnreachableError):
        return None


def _read(folder: Path) -> LiveReport | None:
    report = read_last_report(folder)
    if report is None or (datetime.now(UTC) - report.at).total_seconds() > STALE_SECONDS:
        return None
    return LiveReport(report)
