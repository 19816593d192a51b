"""`rollout-service doctor`: what this machine has, what it lacks, and the command that fixes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from rollout_service.cli.checks import Check

EXAMPLE = "Example: rollout-service doctor --json"

STYLES = {"ok": "green", "missing": "bold red", "limited": "yellow"}


def command(
    config: Annotated[Path | None, typer.Option(help="Settings file; default rollout.toml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine; exit code 1 when something is missing that the service needs.

    `limited` is what works without, though less well.
    """

    def main() -> int:
        from rollout_service.cli.checks import check_machine
        from rollout_service.settings import load_settings

        checks = check_machine(load_settings(config))
        if as_json:
            common.print_json([check.as_dict() for check in checks])
        else:
            _show(checks, common.out())
        return 1 if any(check.state == "missing" for check in checks) else 0

    common.run_blocking(main)


def _show(checks: list[Check], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "state", "found", box=None)
    for check in checks:
        state = Text(check.state, style=STYLES[check.state])
        table.add_row(Text(check.name), state, Text(check.found, overflow="fold"))
    console.print(table)
    mendable = [check for check in checks if check.fix]
    if mendable:
        console.print("\nHow to mend it:")
    for check in mendable:  # outside of the table: a command must not be broken by the width of the terminal
        console.print(f"  {check.name}: {check.fix}", markup=False, soft_wrap=True)
