"""`rollout-service config`: show the settings with their sources, and print their reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson

app = typer.Typer(name="config", help="Show the settings with their sources, or their reference.", no_args_is_help=True)


@app.command(
    "show",
    epilog="Example: rollout-service config show --rollout-workers 64",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@common.command
def show(context: typer.Context, as_json: AsJson = False) -> None:
    """Show every setting's value and source: a flag, a variable, a line of the file, or the default.

    Takes the flags of `serve`, including --config, and shows the values that `serve` would use. Secrets are hidden.
    """
    config, flags = _flags_of_serve(context.args)

    from rollout_service.settings import build_settings, read_sources

    sources = read_sources(config, **flags)
    values = _values(build_settings(sources).model_dump(mode="json"), ())
    rows = [
        {"key": ".".join(path), "value": value, "origin": str(source.origin), "where": source.where or None}
        for path, value in values
        for source in [sources.source(path)]
    ]
    common.print_json(rows) if as_json else _show(rows)


@app.command("docs", epilog="Example: rollout-service config docs > settings.md")
@common.command
def docs() -> None:
    """Print the reference of all settings as Markdown: key, type, default, variable, flag, and meaning."""
    from rollout_service.cli.settings_reference import reference

    common.print_line(reference().removesuffix("\n"))


def _flags_of_serve(arguments: list[str]) -> tuple[Path | None, dict[str, Any]]:
    from rollout_service.cli import serve

    parser = typer.Typer()
    parser.command(name="serve")(serve.command)
    parameters = typer.main.get_command(parser).make_context("config show", arguments).params
    return parameters["config"], serve.settings_of(parameters)


def _values(tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _values(value, (*path, name))
        else:
            yield (*path, name), value


def _show(rows: list[dict[str, Any]]) -> None:
    import json

    from rollout_service.cli.console import id_column, table

    lines = table(id_column("key"), "value", "set by")
    for row in rows:
        value = "" if row["value"] is None else json.dumps(row["value"], ensure_ascii=False)
        lines.add_row(row["key"], value, row["where"] or row["origin"])
    common.out().print(lines)
