"""`rollout-service demo`: the main job from end to end, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout_service.cli import common
from rollout_service.cli.demo.options import DemoEngine, DemoPolicy, DemoSandbox

EXAMPLE = "Example: rollout-service demo --rollouts 64 --json figures.json"


def command(
    rollouts: Annotated[int, typer.Option(min=1, help="How many.")] = 64,
    sandbox: Annotated[
        DemoSandbox, typer.Option(help="Where tools run; local isolates nothing.")
    ] = DemoSandbox.APPTAINER,
    engine: Annotated[
        DemoEngine, typer.Option(help="What serves the policy; sglang is the real one, on the CPU.")
    ] = DemoEngine.EMBEDDED,
    policy: Annotated[
        DemoPolicy, typer.Option(help="calc-tuned knows the job, calc-base half of it.")
    ] = DemoPolicy.TUNED,
    concurrency: Annotated[int, typer.Option(min=1, help="Agents at once.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the samples; the embedded engine draws the same again.")
    ] = 0,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the store, the log and the batch go; default a new folder.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The batch, a rollout a line; default in the state dir."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the figures as JSON: to FIGURES, or to stdout without it.")
    ] = False,
    figures: Annotated[Path | None, typer.Argument(help="With --json: the file for the figures.")] = None,
) -> None:
    """Start a server, roll out calculations in sandboxes, and show what a trainer gets.

    Exit code 0 only if every trajectory passes the invariants and, with calc-tuned, 90 % succeed.
    """

    async def main() -> int:
        from rollout_service.cli.demo.run import DemoPlan, run_demo

        if figures is not None and not as_json:
            raise common.CommandError(f"{figures} is not an option.", hint=f"Did you mean --json {figures}?")

        plan = DemoPlan(
            rollouts=rollouts,
            sandbox=sandbox,
            engine=engine,
            policy=policy,
            concurrency=concurrency,
            temperature=temperature,
            seed=seed,
        )
        result = await run_demo(plan, state_dir, output, quiet=as_json and figures is None)
        if as_json:
            result.write(figures)
        return result.exit_code

    common.run(main)
