"""The command line: `rollout-service COMMAND`, one module a command."""

from __future__ import annotations

import typer

from rollout_service.cli import backends, config, demo, doctor, env, image, runs, serve, submit, watch

app = typer.Typer(
    name="rollout-service",
    help="Rollout-as-a-Service: agentic rollouts in sandboxes for any RL trainer, over HTTP.",
    epilog="Example: rollout-service demo   (or rollout-service COMMAND --help)",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: a third of the time, and paragraphs are wrapped as one
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (serve, demo, submit, watch, doctor):
    app.command(name=module.__name__.rpartition(".")[2], epilog=module.EXAMPLE)(module.command)
for group in (backends, runs, image, env, config):
    app.add_typer(group.app)

__all__ = ["app"]
