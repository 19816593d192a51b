"""Attacks an environment's grading, in the sandboxes that the settings configure."""

from __future__ import annotations

import anyio.to_thread
from rich.console import Console
from rich.text import Text

from rollout_service.authoring.attacks import SCRIPTS, AttackReport, AttackVerdict, attack_environment
from rollout_service.base.errors import did_you_mean
from rollout_service.cli import common
from rollout_service.cli.common import CommandError
from rollout_service.cli.console import id_column, table
from rollout_service.cli.env.check import load_environment, read_dataset
from rollout_service.cli.env.engines import PoolModels
from rollout_service.cli.env.run import parse_instance
from rollout_service.settings import load_settings

STYLES = {
    AttackVerdict.HELD: "green",
    AttackVerdict.FORGED: "red",
    AttackVerdict.NULLED: "red",
    AttackVerdict.NOT_PROMISED: "yellow",
}
PROGRESS_EVERY = 10


async def attack(
    environment: str,
    instance: str | None,
    names: list[str],
    at_once: int,
    pools: PoolModels,
    *,
    as_json: bool,
) -> int:
    known = {script.name: script for script in SCRIPTS}
    for name in names:
        if name not in known:
            raise CommandError(
                f"there is no attack {name!r}{did_you_mean(name, known)}",
                hint="Leave --only out to run all; its output names each, and says what it does.",
            )
    chosen = [known[name] for name in names] or list(SCRIPTS)
    loaded = await anyio.to_thread.run_sync(load_environment, environment)
    data = parse_instance(instance) if instance is not None else next(iter(read_dataset(loaded)), None)
    common.err().print(f"Running {common.count(len(chosen), 'attack')}")
    async with pools.trial(load_settings()) as (sandboxes, models):
        report = await attack_environment(
            loaded,
            sandboxes,
            instance=data,
            attacks=chosen,
            max_concurrent=at_once,
            models=models,
            on_outcome=lambda done: _show_progress(done, len(chosen)),
        )
    common.print_json(report.as_dict()) if as_json else show(report, common.out())
    return 1 if report.broken else 0


def _show_progress(done: int, count: int) -> None:
    if done % PROGRESS_EVERY == 0 and done < count:
        common.err().print(f"{done} of {count} done")


def show(report: AttackReport, console: Console) -> None:
    rows = table(id_column("attack"), "verdict", "reward", "description")
    for outcome in report.outcomes:
        reward = "none" if outcome.reward is None else f"{outcome.reward:g}"
        verdict = Text(outcome.verdict, style=STYLES[outcome.verdict])
        rows.add_row(outcome.attack, verdict, reward, f"{outcome.does} {outcome.detail}".strip())
    console.print(rows)
    for cause, names in report.causes.items():
        line = f"{cause} ({common.count(len(names), 'attack')}): {', '.join(names)}"
        console.print(Text(line, style="red"), soft_wrap=True)
    left = sum(outcome.verdict is AttackVerdict.NOT_PROMISED for outcome in report.outcomes)
    attacks = common.count(len(report.outcomes), "attack")
    console.print(
        f"{report.environment}: {attacks}, {report.broken} broken, {left} not promised; "
        f"an agent that does nothing gets {report.idle_reward:g}"
    )
