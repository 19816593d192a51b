"""Audits an environment, in the sandboxes that the settings configure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio.to_thread
from pydantic import JsonValue
from rich.console import Console
from rich.text import Text

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_service.authoring.audit import audit_environment
from rollout_service.authoring.audit_report import AuditReport, InstanceAudit, TrialRecord
from rollout_service.cli import common
from rollout_service.cli.console import table
from rollout_service.cli.env.check import load_environment, read_dataset
from rollout_service.cli.env.engines import PoolModels
from rollout_service.cli.env.run import OwnServer, parse_instance
from rollout_service.settings import load_settings

MIB = 1024 * 1024


async def audit(
    environment: str,
    instance: str | None,
    instances: int,
    runs: int,
    at_once: int,
    backend: str | None,
    pools: PoolModels,
    *,
    as_json: bool,
) -> int:
    loaded = await anyio.to_thread.run_sync(load_environment, environment)
    known = [parse_instance(instance)] if instance is not None else read_dataset(loaded)
    data = known[:instances]
    more = f" of {len(known)}; --instances {len(known)} for all" if len(data) < len(known) else ""
    common.err().print(f"Auditing {common.count(len(data), 'instance')}{more}")
    async with pools.trial(load_settings()) as (sandboxes, models):
        report = await audit_environment(
            loaded, sandboxes, list(enumerate(data)), runs=runs, at_once=at_once, models=models
        )
    if backend is not None:
        await _ask_policy(report, environment, data, runs, backend, pools)
    common.print_json(report.as_dict()) if as_json else show(report, common.out())
    return 1 if report.findings else 0


async def _ask_policy(
    report: AuditReport,
    environment: str,
    data: Sequence[dict[str, JsonValue]],
    runs: int,
    backend: str,
    pools: PoolModels,
) -> None:
    own = OwnServer(environment, backend=backend, script=None, model=None, sandbox=None, pools=pools)
    async with own.running() as client:
        for one, instance in zip(report.instances, data, strict=True):
            for _ in range(runs):
                request = RolloutRequest(task=Task(environment=report.environment, instance=instance))
                one.policy_rewards.append((await client.run(request)).reward)


def show(report: AuditReport, console: Console) -> None:
    columns = ("instance", "idle", "solution", "init s", "solve s", "evaluate s", "memory MiB", "pass rate")
    rows = table(*columns)
    for one in report.instances:
        rows.add_row(str(one.index), *_cells(one))
    console.print(rows)
    for finding in report.findings:
        console.print(Text(finding, style="red"), soft_wrap=True)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    verdict = "good" if report.has_solution else "without findings"
    console.print(
        f"{report.environment}: {len(report.good)} of {common.count(len(report.instances), 'instance')} {verdict}; "
        f"network {report.network}, {common.count(report.connections, 'connection')}, {report.refused} refused"
    )


def _cells(one: InstanceAudit) -> list[str]:
    trials = [*one.idle, *one.solved]

    def longest(seconds: Callable[[TrialRecord], float]) -> str:
        return f"{max((seconds(trial) for trial in trials), default=0):.2f}"

    return [
        _rewards(one.idle),
        _rewards(one.solved) if one.solved else "none",
        longest(lambda trial: trial.init_seconds),
        longest(lambda trial: trial.solve_seconds),
        longest(lambda trial: trial.evaluate_seconds),
        f"{max((trial.memory_bytes for trial in trials), default=0) / MIB:.0f}",
        "" if one.pass_rate is None else f"{one.pass_rate:.0%}",
    ]


def _rewards(trials: Sequence[TrialRecord]) -> str:
    shown = ["failed" if trial.reward is None else f"{trial.reward:g}" for trial in trials]
    return ", ".join(dict.fromkeys(shown))
