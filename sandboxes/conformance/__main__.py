"""The command line: `python -m sandboxes.conformance --help`."""

import importlib
import json
import tempfile
from pathlib import Path
from typing import Annotated

import anyio
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sandboxes.config import ProviderConfig
from sandboxes.conformance import CHECKS, Check, CheckResult, ConformanceReport, run_checks
from sandboxes.contract import SandboxProvider
from sandboxes.errors import SandboxError
from sandboxes.factory import make_provider

COLORS = {"holds": "green", "fails": "red", "known failure": "yellow", "holds now": "magenta"}
UNUSABLE = 2
"""If nothing could be checked; 1 means that checks failed."""


def main(
    provider: Annotated[
        str, typer.Argument(help="A provider's name, or MODULE:FACTORY, a function that takes a state folder.")
    ],
    image: Annotated[
        str | None, typer.Option(help="The image of the sandboxes; by default the provider's own.")
    ] = None,
    config: Annotated[str, typer.Option(help="Settings of a named provider, e.g. '{\"fakeroot\": true}'.")] = "{}",
    check: Annotated[list[str] | None, typer.Option(help="Run only this check; may be repeated.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file, or - to print it.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the checks and run none.")] = False,
) -> None:
    """Check that a provider keeps the contract of sandboxes.

    Example: python -m sandboxes.conformance apptainer --image base --json report.json
    """
    console = Console(stderr=json_path == Path("-"), highlight=False)
    chosen = _select_checks(check or [])
    if list_only:
        console.print(_table_of(chosen))
        return
    try:
        report = anyio.run(_run, provider, config, chosen, image, console)
    except (SandboxError, ValidationError) as error:
        console.print(f"[red]{escape(str(error))}[/] {escape(getattr(error, 'hint', ''))}")
        raise typer.Exit(UNUSABLE) from error
    failures = sum(outcome.verdict == "fails" for outcome in report.outcomes)
    known = sum(outcome.verdict == "known failure" for outcome in report.outcomes)
    console.print(f"{len(report.outcomes)} checks, {failures} failed, {known} failed as the provider declares")
    if json_path is not None:
        text = json.dumps(report.as_json(), indent=2)
        typer.echo(text) if json_path == Path("-") else json_path.write_text(text + "\n")
    raise typer.Exit(0 if report.conforms else 1)


def _select_checks(names: list[str]) -> list[Check]:
    unknown = set(names) - {check.__name__ for check in CHECKS}
    if unknown:
        raise typer.BadParameter(f"there is no check {', '.join(sorted(unknown))}; --list shows all checks")
    return [check for check in CHECKS if not names or check.__name__ in names]


def _table_of(checks: list[Check]) -> Table:
    table = Table("check", "what the contract promises")
    for check in checks:
        table.add_row(check.__name__, " ".join((check.__doc__ or "").split()))
    return table


async def _run(
    provider_name: str, config: str, checks: list[Check], image: str | None, console: Console
) -> ConformanceReport:
    with tempfile.TemporaryDirectory() as state:
        provider = _make(provider_name, config, Path(state))
        unknown = set(provider.known_failures) - {check.__name__ for check in CHECKS}
        if unknown:
            raise typer.BadParameter(
                f"the provider's known_failures name checks that do not exist: {', '.join(sorted(unknown))}"
            )
        try:
            return await run_checks(checks, provider, image, lambda outcome: _show(outcome, console))
        finally:
            await provider.close()


def _make(name: str, config: str, state: Path) -> SandboxProvider:
    if ":" not in name:
        settings = {**json.loads(config), "provider": name}
        return make_provider(TypeAdapter[ProviderConfig](ProviderConfig).validate_python(settings), state)
    module, _, factory = name.partition(":")
    try:
        provider = getattr(importlib.import_module(module), factory)(state)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{name}: {error}") from error
    if not isinstance(provider, SandboxProvider):
        raise typer.BadParameter(f"{name} returned a {type(provider).__name__}, which is not a SandboxProvider")
    return provider


def _show(outcome: CheckResult, console: Console) -> None:
    detail = outcome.promise if outcome.verdict == "holds" else outcome.reason
    color = COLORS[outcome.verdict]
    console.print(f"[{color}]{outcome.verdict}[/] {outcome.check} ({outcome.seconds:.1f} s): {escape(detail)}")


if __name__ == "__main__":
    typer.run(main)
