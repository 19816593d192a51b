"""The command line: `rollout-service COMMAND`, one module or folder per command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from rollout_service import __version__
from rollout_service.cli import common

COMMANDS = ("serve", "demo", "submit", "show", "watch", "trace", "doctor", "backup", "restore")
GROUPS = (
    "backends",
    "nodes",
    "runs",
    "sessions",
    "image",
    "env",
    "harness",
    "config",
    "store",
    "slurm",
    "trainer",
)


class _Commands(Mapping[str, Any]):
    """The commands by name, each imported and made on demand: making all takes as long as everything else."""

    def __getitem__(self, name: str) -> Any:
        if name not in (*COMMANDS, *GROUPS):
            raise KeyError(name)
        return _make(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*COMMANDS, *GROUPS))

    def __len__(self) -> int:
        return len(COMMANDS) + len(GROUPS)


@cache
def _make(name: str) -> Any:
    module: Any = import_module(f"{__name__}.{name}")
    alone = typer.Typer(rich_markup_mode=None)
    if name in GROUPS:
        alone.add_typer(module.app)
    else:
        alone.command(name=name, epilog=module.EXAMPLE)(module.command)
    return typer.main.get_group(alone).commands[name]


class _Root(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _Commands())


app = typer.Typer(
    name="rollout-service",
    help="Run agentic rollouts in sandboxes for any RL trainer, over HTTP.",
    epilog="Example: rollout-service demo   (or rollout-service COMMAND --help)",
    cls=_Root,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help takes a third of the time, and wraps paragraphs as a whole
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        common.print_line(f"rollout-service {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Run agentic rollouts in sandboxes for any RL trainer, over HTTP."""


__all__ = ["app"]
