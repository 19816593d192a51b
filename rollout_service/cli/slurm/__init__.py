"""`rollout-service slurm`: submit the service as a job, watch it, reach it, let it grow and shrink, and end it."""

from __future__ import annotations

import typer

from rollout_service.cli.slurm import scale, submit, tasks, watch

app = typer.Typer(name="slurm", help="Run the service as a job of Slurm.", no_args_is_help=True)

app.command("submit", epilog=submit.EXAMPLE)(submit.command)
app.command("scale", epilog=scale.EXAMPLE)(scale.command)
app.command("status", epilog="Example: rollout-service slurm status --json")(watch.status)
app.command("logs", epilog="Example: rollout-service slurm logs rollouts-1a2b3c --part node-n1")(watch.logs)
app.command("tunnel", epilog="Example: rollout-service slurm tunnel --port 8080")(watch.tunnel)
app.command("stop", epilog="Example: rollout-service slurm stop rollouts-1a2b3c")(watch.stop)
for task in (tasks.run, tasks.node, tasks.engine):
    example = f"Example: rollout-service slurm {task.__name__} ~/rollout-jobs/mine"
    app.command(task.__name__, hidden=True, epilog=example)(task)

__all__ = ["app"]
