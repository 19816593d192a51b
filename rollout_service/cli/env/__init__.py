"""`rollout-service env`: make an environment, check it, attack its grading, and try it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import AsJson, Key

app = typer.Typer(
    name="env",
    help="List, make, add, build, prepare, check, attack, and try environments.",
    no_args_is_help=True,
)

Environment = Annotated[
    str,
    typer.Argument(
        help="Folder with an environment.toml or of Harbor's tasks, image that contains one, Python file with one, "
        "module:object, or name of an installed environment.",
        autocompletion=completion.environments,
    ),
]
Bases = Annotated[list[str] | None, typer.Option(help="NAME=PATH for a base of the Dockerfiles; may be repeated.")]
Index = Annotated[int, typer.Option(min=0, help="Index of the instance in the data set, from 0.")]
Instance = Annotated[str | None, typer.Option(help="Instance to use instead, as JSON.")]
PoolModel = Annotated[
    list[str] | None,
    typer.Option(
        help="POOL=MODEL: an embedded engine for another pool that the environment asks, such as judge=calc-tuned; "
        "may be repeated."
    ),
]
PoolScript = Annotated[
    list[str] | None,
    typer.Option(
        help="POOL=FILE: a scripted model for such a pool, with a turn per line as of --script; may be repeated."
    ),
]
PoolsUrl = Annotated[
    str | None,
    typer.Option("--url", help="Server whose engines answer for the pools that the environment asks."),
]
ServerUrl = Annotated[str | None, typer.Option("--url", help="Use this server instead of this machine.")]


@app.command("list", epilog="Example: rollout-service env list --url http://127.0.0.1:8080")
@common.command
async def list_environments(url: ServerUrl = None, key: Key = None, as_json: AsJson = False) -> None:
    """Show the environments that are installed on this machine, or that a server has."""
    from rollout_service.cli.env.check import environment_table, list_installed

    if url is None:
        specs, problems = list_installed()
        for problem in problems:
            common.err().print(problem, style="red", soft_wrap=True)
    else:
        async with common.connect(url, key) as client:
            specs = [found.model_dump(mode="json") for found in await client.environments()]
    common.print_json(specs) if as_json else common.out().print(environment_table(specs))


@app.command("new", epilog="Example: rollout-service env new word-count --folder environments")
@common.command
def new(
    name: Annotated[str, typer.Argument(help="The environment's name: letters, digits, '.', '_', or '-'.")],
    folder: Annotated[Path, typer.Option(help="Folder to make the folder NAME in.")] = Path(),
    template: Annotated[
        str, typer.Option(help="What to begin with: files, terminal, stem, mcp, swe, or game.")
    ] = "files",
) -> None:
    """Make a small working environment: tasks, a prompt, a grader, and a solution, without a Python module.

    `files`: the agent writes a file. `terminal`: it works in a shell. `stem`: it answers with a number. `mcp`: it uses
    the tools of a server. `swe`: it repairs code, which hidden cases test. `game`: it plays against Python code.
    """
    from rollout_service.cli.env.new import make_environment

    made = make_environment(name, folder, template)
    common.err().print(f"made {made}; now try:", soft_wrap=True)
    run = f"run {made} --script {made / 'solution.jsonl'}"
    for command in (f"check {made}", run, f"audit {made}"):
        common.err().print(f"  rollout-service env {command}", soft_wrap=True)


@app.command("add", epilog="Example: rollout-service env add ./terminal-tasks")
@common.command
def add(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder with an environment.toml, image with one, or folder of Harbor's tasks."),
    ],
    config: Annotated[
        Path | None, typer.Option(help="Settings file; by default, that of the service: rollout.toml.")
    ] = None,
) -> None:
    """Add an environment to the settings file, so that the service has it from its next start on."""
    import os

    from rollout_service.cli.env.add import add_to_settings
    from rollout_service.cli.env.check import load_environment

    place = folder.expanduser().absolute()
    name = load_environment(str(place)).spec.name
    file = config or Path(os.environ.get("ROLLOUT_CONFIG", "rollout.toml"))
    is_new = add_to_settings(file, place)
    common.err().print(f"{file}: {name} {'added' if is_new else 'was there'}", soft_wrap=True)


@app.command("build", epilog="Example: rollout-service env build ./terminal-tasks --base debian:12=debian.sif")
@common.command
def build(
    environment: Environment,
    base: Bases = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Images built at once; by default, half as many as CPUs.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build images again even if they exist.")] = False,
    as_json: AsJson = False,
) -> int:
    """Build the images of an environment's tasks from their Dockerfiles; unchanged ones are not built again."""
    from rollout_service.cli.env.prepare import build_images

    bases = common.name_value_pairs(base, "--base")
    return build_images(environment, bases=bases, jobs=jobs, force=force, as_json=as_json)


@app.command("prepare", epilog="Example: rollout-service env prepare tasks.jsonl --environment swe --jobs 4")
@common.command
def prepare(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ENVIRONMENT|FILE|RUN",
            help="An environment, as in the other commands; a .jsonl or .parquet file of tasks, or, with "
            "--environment, of instances; or, with --url, the id of a run.",
        ),
    ],
    environment: Annotated[
        str | None, typer.Option(help="With a file: the environment that its rows are instances of.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="With an environment: the part of the data set; by default, all.")
    ] = None,
    base: Bases = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Images made at once; by default, half as many as CPUs.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="The server of the run.")] = None,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Pull or build the images of all instances of a data set, ahead of a run.

    Each image is made once, and those that are there are skipped, so a second call goes on after an interruption. No
    image is begun that would leave too little space. Failures are listed at the end, and make the exit code 1.
    """
    from rollout_service.cli.env.dataset_part import FILES, part_of_environment, part_of_file, part_of_run
    from rollout_service.cli.env.prepare import prepare as make_images

    if url is not None:
        part = part_of_run(url, key, what)
    elif Path(what).suffix in FILES:
        part = part_of_file(Path(what), environment)
    else:
        part = part_of_environment(what, split)
    bases = common.name_value_pairs(base, "--base")
    return make_images(part, bases=bases, jobs=jobs, as_json=as_json)


@app.command("check", epilog="Example: rollout-service env check ./word-count")
@common.command
def check(
    environment: Environment,
    solve: Annotated[
        bool,
        typer.Option("--run", help="Also run each task's solution, which must get 1, and nothing, which must not."),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="With --run: only so many tasks.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="With --run: tasks that run at once.")] = 2,
    good: Annotated[
        Path | None, typer.Option(help="With --run: file for the instances of good tasks, as JSONL.")
    ] = None,
    pool_model: PoolModel = None,
    pool_script: PoolScript = None,
    url: PoolsUrl = None,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Validate an environment: its settings, its images, and every instance of its data set.

    Each finding says what is wrong, and where. The exit code is 1 if there are any.
    """
    from rollout_service.cli.env.check import check_environment, with_solutions

    report = check_environment(environment)
    if solve:
        from rollout_service.cli.env.engines import PoolModels

        pools = PoolModels.read(pool_model, pool_script, url, key)
        report = with_solutions(report, environment, limit=limit, at_once=at_once, good=good, pools=pools)
    common.print_json(report) if as_json else report.show(common.out())
    return 1 if report.findings else 0


@app.command("attack", epilog="Example: rollout-service env attack ./word-count")
@common.command
async def attack(
    environment: Environment,
    instance: Annotated[
        str | None, typer.Option(help="Instance to attack, as JSON; by default, the data set's first.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this attack; may be repeated.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Attacks that run at once.")] = 4,
    pool_model: PoolModel = None,
    pool_script: PoolScript = None,
    url: PoolsUrl = None,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Run scripted reward hacks against an environment's grading.

    Each attack is a rollout of its own in real sandboxes. `held`: it got no more than an agent that does nothing.
    `forged`: it got more. `nulled`: it got no reward at all. `not promised`: it succeeded by changing the programs of a
    grader in the agent's own sandbox, which is not protected. The exit code is 1 if any attack was forged or nulled.
    """
    from rollout_service.cli.env.attack import attack as run_attacks
    from rollout_service.cli.env.engines import PoolModels

    pools = PoolModels.read(pool_model, pool_script, url, key)
    return await run_attacks(environment, instance, only or [], at_once, pools, as_json=as_json)


@app.command("install", epilog="Example: rollout-service env install swe")
@common.command
def install(
    name: Annotated[
        str,
        typer.Argument(help="Its name, such as swe, or a folder of tasksets. An unknown name lists all."),
    ],
) -> None:
    """Install the packages that an environment runs in a Python environment of their own.

    Nothing is done if they are there. They come from the package index that uv or pip is configured with.
    """
    from rollout_service.cli.env.install import install_library

    common.out().print(str(install_library(name)), soft_wrap=True)


@app.command("audit", epilog="Example: rollout-service env audit ./word-count --runs 5")
@common.command
async def audit(
    environment: Environment,
    instance: Annotated[str | None, typer.Option(help="Instance to audit, as JSON, instead of the data set's.")] = None,
    instances: Annotated[int, typer.Option(min=1, help="Instances of the data set to audit, from its start.")] = 3,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each agent, to see whether its reward changes.")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Instances that are audited at once.")] = 2,
    backend: Annotated[
        str | None, typer.Option(help="URL of an engine, whose policy's pass rate is measured too.")
    ] = None,
    pool_model: PoolModel = None,
    pool_script: PoolScript = None,
    url: PoolsUrl = None,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Run tasks with an idle agent and with the environment's own solution, and report on their quality.

    Finds tasks that the solution does not solve or that an idle agent does, rewards that change from run to run, and
    files of the grader or answers that the agent can read. Measures the time of each stage and the memory. The exit
    code is 1 if anything is wrong.
    """
    from rollout_service.cli.env.audit import audit as run_audit
    from rollout_service.cli.env.engines import PoolModels

    pools = PoolModels.read(pool_model, pool_script, url, key)
    return await run_audit(environment, instance, instances, runs, at_once, backend, pools, as_json=as_json)


@app.command("run", epilog="Example: rollout-service env run ./word-count --script word-count/solution.jsonl")
@common.command
async def run(
    environment: Environment,
    index: Index = 0,
    instance: Instance = None,
    backend: Annotated[
        str | None, typer.Option(help="URL of an engine; by default, the embedded one with a small policy.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(help="JSONL file with the turns of a scripted model, such as a known solution."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The embedded engine's model.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="apptainer, or local (isolates nothing).")] = None,
    pool_model: PoolModel = None,
    pool_script: PoolScript = None,
    url: ServerUrl = None,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Roll out one task with a scripted or real model, and show its whole trajectory.

    Uses a server of its own that ends with the command, or the one at --url. The exit code is 1 if the rollout has no
    result; a wrong answer is a result.
    """
    from rollout_service.cli.env.engines import PoolModels
    from rollout_service.cli.env.run import OwnServer, run_one

    pools = PoolModels.read(pool_model, pool_script)
    own = OwnServer(environment, backend=backend, script=script, model=model, sandbox=sandbox, pools=pools)
    return await run_one(own, index, instance, url, key, as_json=as_json)


@app.command("shell", epilog="Example: rollout-service env shell ./word-count --index 2 --stage evaluate")
@common.command
async def shell(
    environment: Environment,
    index: Index = 0,
    instance: Instance = None,
    stage: Annotated[
        Literal["rollout", "evaluate"],
        typer.Option(help="rollout: where the agent begins. evaluate: where the grader begins, with its files."),
    ] = "rollout",
    solve: Annotated[
        bool, typer.Option("--solve", help="First run the environment's own solution in the agent's place.")
    ] = False,
) -> int:
    """Open a shell in the sandbox of an instance, as the agent or the grader finds it.

    The sandbox is removed when the shell ends. The exit code is the shell's.
    """
    from rollout_service.cli.env.shell import open_shell

    return await open_shell(environment, index, instance, stage, solve=solve)


@app.command("serve", epilog="Example: rollout-service env serve ./word-count --port 8000 --sessions 8")
@common.command
async def serve(
    environment: Environment,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 for any that is free.")] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Clients served at once.")] = 1,
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Also listen beyond loopback, where anybody may connect.")
    ] = False,
    pool_model: PoolModel = None,
    pool_script: PoolScript = None,
    url: PoolsUrl = None,
    key: Key = None,
) -> None:
    """Serve an environment to clients of OpenEnv, until the command is ended.

    Each client has an episode of its own, in a sandbox that ends with its connection. The protocol has no keys, so an
    address beyond loopback is refused without --without-key.
    """
    from rollout_service.cli.env.engines import PoolModels
    from rollout_service.cli.env.serve import check_host
    from rollout_service.cli.env.serve import serve as serve_environment

    check_host(host, without_key=without_key)
    pools = PoolModels.read(pool_model, pool_script, url, key)
    await serve_environment(environment, host, port, sessions, pools)
