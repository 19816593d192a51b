"""`rollout-service env`: make an environment, check it, attack its grading, and try it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.common import AsJson, Key

app = typer.Typer(name="env", help="List, make, check, attack, and try environments.", no_args_is_help=True)

Environment = Annotated[
    str,
    typer.Argument(
        help="Folder with an environment.toml, image that contains one, or name of an installed environment."
    ),
]
ServerUrl = Annotated[str | None, typer.Option("--url", help="Use this server instead of this machine.")]


@app.command("list", epilog="Example: rollout-service env list --url http://127.0.0.1:8080")
def list_environments(url: ServerUrl = None, key: Key = None, as_json: AsJson = False) -> None:
    """Show the environments that are installed on this machine, or that a server has."""

    async def main() -> None:
        from rollout_service.cli.env.check import environment_table, list_installed

        if url is None:
            specs, problems = list_installed()
            for problem in problems:
                common.err().print(problem, style="red", soft_wrap=True)
        else:
            async with common.connect(url, key) as client:
                specs = [found.model_dump(mode="json") for found in await client.environments()]
        if as_json:
            common.print_json(specs)
        else:
            common.out().print(environment_table(specs))

    common.run(main)


@app.command("new", epilog="Example: rollout-service env new word-count --folder environments")
def new(
    name: Annotated[str, typer.Argument(help="The environment's name: letters, digits, '.', '_', or '-'.")],
    folder: Annotated[Path, typer.Option(help="Folder to make the folder NAME in.")] = Path(),
) -> None:
    """Make a small working environment: a task file, a prompt, and a grader, without a Python module."""

    def main() -> None:
        from rollout_service.cli.env.new import make_environment

        made = make_environment(name, folder)
        common.err().print(f"made {made}; now try:", soft_wrap=True)
        for command in (f"check {made}", f"run {made} --script {made / 'solution.jsonl'}"):
            common.err().print(f"  rollout-service env {command}", soft_wrap=True)

    common.run_blocking(main)


@app.command("check", epilog="Example: rollout-service env check ./word-count")
def check(environment: Environment, as_json: AsJson = False) -> None:
    """Validate an environment: its settings, its image, and every instance of its data set.

    Each finding says what is wrong, and where. The exit code is 1 if there are any.
    """

    def main() -> int:
        from rollout_service.cli.env.check import check_environment

        report = check_environment(environment)
        if as_json:
            common.print_json(report.as_dict())
        else:
            report.show(common.out())
        return 1 if report.findings else 0

    common.run_blocking(main)


@app.command("attack", epilog="Example: rollout-service env attack ./word-count")
def attack(
    environment: Environment,
    instance: Annotated[
        str | None, typer.Option(help="Instance to attack, as JSON; by default, the data set's first.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this attack; may be repeated.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Attacks that run at once.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Run scripted reward hacks against an environment's grading.

    Each attack is a rollout of its own in real sandboxes. `held`: it got no more than an agent that does nothing.
    `forged`: it got more. `nulled`: it got no reward at all. `not promised`: it succeeded by changing the programs of a
    grader in the agent's own sandbox, which is not protected. The exit code is 1 if any attack was forged or nulled.
    """

    async def main() -> int:
        from rollout_service.cli.env.attack import attack as run_attacks

        return await run_attacks(environment, instance, only or [], at_once, as_json=as_json)

    common.run(main)


@app.command("run", epilog="Example: rollout-service env run ./word-count --script word-count/solution.jsonl")
def run(
    environment: Environment,
    index: Annotated[int, typer.Option(min=0, help="Index of the instance in the data set, from 0.")] = 0,
    instance: Annotated[str | None, typer.Option(help="Instance to use instead, as JSON.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="URL of an engine; by default, the embedded one with a small policy.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(help="JSONL file with the turns of a scripted model, such as a known solution."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The embedded engine's model.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="apptainer, or local (isolates nothing).")] = None,
    url: ServerUrl = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Roll out one task with a scripted or real model, and show its whole trajectory.

    Uses a server of its own that ends with the command, or the one at --url. The exit code is 1 if the rollout has no
    result; a wrong answer is a result.
    """

    async def main() -> int:
        from rollout_service.cli.env.run import OwnServer, run_one

        own = OwnServer(environment, backend=backend, script=script, model=model, sandbox=sandbox)
        return await run_one(own, index, instance, url, key, as_json=as_json)

    common.run(main)
