"""`rollout-service demo`: run rollouts from end to end on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_service.cli import common

EXAMPLE = "Example: rollout-service demo --rollouts 64 --json figures.json"


DemoEngine = Literal["embedded", "sglang"]
DemoSandbox = Literal["apptainer", "local"]
DemoPolicy = Literal["calc-tuned", "calc-base"]


@common.command
async def command(
    rollouts: Annotated[int, typer.Option(min=1, help="Number of rollouts.")] = 16,
    sandbox: Annotated[DemoSandbox, typer.Option(help="What runs the tools; local isolates nothing.")] = "apptainer",
    engine: Annotated[
        DemoEngine, typer.Option(help="What serves the policy; sglang is real SGLang, on the CPU.")
    ] = "embedded",
    policy: Annotated[
        DemoPolicy, typer.Option(help="calc-tuned solves nearly all tasks, calc-base about half.")
    ] = "calc-tuned",
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Nodes that share a Redis; with more than one, the last is killed on the way."),
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Agents at once.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of the sampling; the embedded engine repeats its samples for the same seed."),
    ] = 0,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Keep the server up after the results, and print its page's address."),
    ] = False,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for the store, the log, and the batch; by default, a new one.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the batch, one rollout per line; by default, in the state folder.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write the figures as JSON: to FIGURES, or to stdout if it is left out."),
    ] = False,
    figures: Annotated[Path | None, typer.Argument(help="With --json: file for the figures.")] = None,
) -> int:
    """Start a server, roll out calculation tasks in sandboxes, and show what a trainer gets.

    The exit code is 0 only if every trajectory passes the invariants and, with calc-tuned, 90 % of the rollouts
    succeed.
    """
    from dataclasses import asdict

    from rollout_service.cli.demo.run import DemoPlan, run_demo, write_figures

    if figures is not None and not as_json:
        raise common.CommandError(f"unexpected argument {figures}", hint=f"Did you mean --json {figures}?")

    plan = DemoPlan(
        rollouts=rollouts,
        sandbox=sandbox,
        engine=engine,
        policy=policy,
        concurrency=concurrency,
        temperature=temperature,
        seed=seed,
        nodes=nodes,
        stay=stay,
    )
    summary, exit_code = await run_demo(plan, state_dir, output, quiet=as_json and figures is None)
    if as_json:
        write_figures(figures, asdict(plan), summary.figures())
    return exit_code
