"""`rollout-service trainer`: check that a trainer and a running server agree."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_service.cli import common
from rollout_service.cli.common import DEFAULT_URL, AsJson, CommandError, Key, Url

app = typer.Typer(name="trainer", help="Check that a trainer and a server agree.", no_args_is_help=True)

TRAINERS = ("areal", "openrlhf", "skyrl", "tinker", "trl", "verl", "verl_v0")
TAIL_LINES = 15


@app.command("check", epilog="Example: rollout-service trainer check verl --python ~/verl-env/bin/python")
@common.command
def check(
    name: Annotated[str, typer.Argument(help=f"The trainer: {', '.join(TRAINERS)}.")],
    python: Annotated[
        str, typer.Option(help="The Python of the trainer's environment, which has rollout-client too.")
    ] = "python",
    environment: Annotated[str, typer.Option(help="The environment of the tasks.")] = "calc",
    pool: Annotated[str, typer.Option(help="The pool to train; its weights change, and are put back.")] = "policy",
    tasks: Annotated[int, typer.Option(min=2, help="Tasks per step.")] = 4,
    group: Annotated[int, typer.Option(min=2, help="Rollouts per task.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-4,
    weights: Annotated[
        Path | None, typer.Option(help="A folder that the engines can read, for the new weights.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Train for some steps with a trainer's own code, and compare each with an independent computation.

    It compares the rows and masks with the rollouts, the log-probabilities with a model in torch, the advantages and
    the evaluation with the rewards, and the versions with the weights that were loaded. One rollout of each step comes
    in two segments, and one group has no reward.
    """
    if name not in TRAINERS:
        raise CommandError(f"there is no check for {name!r}", hint=f"There are checks for {', '.join(TRAINERS)}.")
    flags = {"environment": environment, "pool": pool, "tasks": tasks, "group": group, "steps": steps}
    flags |= {"learning-rate": learning_rate} | ({"weights": weights} if weights else {})
    environ = os.environ | {"ROLLOUT_URL": url} | ({"ROLLOUT_KEY": key} if key else {})
    report = run_check(python, name, [f"--{flag}={value}" for flag, value in flags.items()], environ)
    common.print_json(report) if as_json else _show(report)
    return 1 if report["problems"] else 0


def run_check(python: str, name: str, flags: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """Run a check in a trainer's environment and return its report; progress goes to stderr."""
    reading, writing = os.pipe()
    command = [python, "-m", "rollout_client.trainer_check", name, f"--fd={writing}", *flags]
    report: dict[str, Any] = {}
    with os.fdopen(reading) as pipe, tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=[writing]
            )
        except OSError as error:
            raise CommandError(f"{python} cannot be started: {error}", hint="Name a Python with --python.") from error
        finally:
            os.close(writing)
        with process:
            try:
                for line in map(json.loads, pipe):
                    report = line.get("report", report)
                    if "progress" in line:
                        common.err().print(line["progress"])
            except BaseException:
                process.terminate()
                raise
        if not report:
            log.seek(0)
            output = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
            raise CommandError(
                f"the check of {name} ended with code {process.returncode}: " + "\n".join(output),
                hint=f"The environment of {python} needs the trainer, torch, transformers and rollout-client.",
            )
    return report


def _show(report: dict[str, Any]) -> None:
    steps = report["steps"]
    out = common.out()
    out.print(f"{report['trainer']} {report['version']}: {len(steps)} steps, {sum(one['rows'] for one in steps)} rows")
    figures = {
        "largest difference of a log-probability": f"{report['max_logprob_diff']:.1e}",
        "rows with wrong advantages": report["wrong_advantages"],
        "reward, first and last step": f"{report['reward_before']:.3f}, {report['reward_after']:.3f}",
        "reward of the evaluation": f"{report['evaluation_reward']:.3f}",
        "a rollout without a reward": report["failure"],
    }
    for name, value in figures.items():
        out.print(f"  {name:<39}  {value}")
    for problem in report["problems"]:
        out.print(f"  wrong: {problem}")
    out.print("Everything agrees." if not report["problems"] else "The trainer and the service do not agree.")
