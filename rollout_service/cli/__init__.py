"""The command line: `rollout-service COMMAND`, one module or folder per command."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_service import __version__
from rollout_service.cli import (
    backends,
    common,
    config,
    demo,
    doctor,
    env,
    harness,
    image,
    nodes,
    runs,
    serve,
    sessions,
    show,
    slurm,
    submit,
    trace,
    watch,
)

app = typer.Typer(
    name="rollout-service",
    help="Run agentic rollouts in sandboxes for any RL trainer, over HTTP.",
    epilog="Example: rollout-service demo   (or rollout-service COMMAND --help)",
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


for module in (serve, demo, submit, show, watch, trace, doctor):
    app.command(name=module.__name__.rpartition(".")[2], epilog=module.EXAMPLE)(module.command)
for group in (backends, nodes, runs, sessions, image, env, harness, config, slurm):
    app.add_typer(group.app)

__all__ = ["app"]
