"""`rollout-service doctor`: check this machine, and name the commands that add missing parts.

With a batch and a model, it checks instead whether the batch's log-probabilities are the model's. With `--live`, it
asks a service that runs for its problems.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson, CommandError, Config, Key, Url

if TYPE_CHECKING:
    from rich.console import Console

    from rollout_service.cli.doctor.checks import Check

EXAMPLE = "Example: rollout-service doctor --batch batch.safetensors --model /checkpoints/step-10"

STYLES = {"ok": "green", "missing": "bold red", "limited": "yellow"}


@common.command
def command(
    config: Config = None,
    batch: Annotated[Path | None, typer.Option(help="A leased batch, as arrays, to compare with --model.")] = None,
    model: Annotated[Path | None, typer.Option(help="With --batch: the folder of the weights that sampled it.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="With --batch: the temperature that it was sampled at.")
    ] = 1.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --batch: file for every token, one JSON object per line."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask a service what is wrong, stuck, slow or held back, and why.")
    ] = False,
    url: Url = common.DEFAULT_URL,
    key: Key = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="The service's state folder; with --live, it is read if the service does not answer."),
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="With --live: show where each waits.")] = False,
    as_json: AsJson = False,
) -> int:
    """Check that this machine has everything that the service needs, and show how to add missing parts.

    `missing` keeps the service from running rollouts, and makes the exit code 1; `limited` works, with reduced
    functionality. With --batch and --model, recompute the log-probability of every sampled token with transformers
    instead, and show the differences by token, version, and position. With --live, ask the service at --url; the exit
    code is 1 if something is wrong.
    """
    if live:
        from rollout_service.cli.doctor.live import check_live

        return check_live(url, key, state_dir, config, stacks=stacks, as_json=as_json)
    if stacks:
        raise CommandError("--stacks is only for a service that runs", hint="Add --live.")
    if batch is not None and model is not None:
        return _compare(batch, model, temperature, output, as_json=as_json)
    if batch is not None or model is not None:
        raise CommandError("--batch and --model must be given together", hint="Pass both, or neither.")
    return _check(config, state_dir, as_json=as_json)


def _check(config: Path | None, state_dir: Path | None, *, as_json: bool) -> int:
    from rollout_service.cli.doctor.checks import check_machine
    from rollout_service.settings import load_settings

    checks = check_machine(load_settings(config, state_dir=state_dir))
    common.print_json(checks) if as_json else _show(checks, common.out())
    return 1 if any(check.state == "missing" for check in checks) else 0


def _compare(batch: Path, model: Path, temperature: float, output: Path | None, *, as_json: bool) -> int:
    from rollout_service.cli.doctor import batch as doctor_batch

    arrays, tokens = doctor_batch.compare(batch, model, temperature)
    found = doctor_batch.report(arrays, tokens)
    if output is not None:
        doctor_batch.write_tokens(tokens, output)
    common.print_json(found) if as_json else doctor_batch.show(found, common.out())
    return 0


def _show(checks: list[Check], console: Console) -> None:
    from rich.text import Text

    from rollout_service.cli.console import table

    rows = table("check", "state", "found")
    for check in checks:
        rows.add_row(check.name, Text(check.state, style=STYLES[check.state]), check.found)
    console.print(rows)
    fixable = [check for check in checks if check.fix]
    if fixable:
        console.print("\nHow to fix it:")
    for check in fixable:  # outside the table, so that a narrow terminal does not break a command
        console.print(f"  {check.name}: {check.fix}", soft_wrap=True)
