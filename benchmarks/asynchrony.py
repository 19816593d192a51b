"""Measure the wall time to the same reward of asynchronous against synchronous training, with long-tailed rollouts.

Run: python benchmarks/asynchrony.py [--json FILE] [--quick | --smoke]
It needs what `scripts/train --install` installs, and Apptainer.

Both train the same policy, from the same seed, with the reference trainer on the environment `slow`, whose tool takes
a lognormal time: 1 s at the median, 2 s on average, up to 30 s. Synchronously, every step waits for its slowest
rollout. The clock stops when the mean reward of two batches has reached the goal. `speedup` is the ratio of the two
times, or null if either run does not reach the goal in the time allowed. `--quick` times three steps, `--smoke` one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import anyio
from common import HERE, Options, report, run

EXAMPLES = HERE.parent / "examples"
GOAL, MINUTES = 0.9, 20.0
NEVER = 2.0
"""A mean reward that is never reached."""
ETA = 2
WORKERS = 48
"""Agents at once; most of them are waiting for their tool."""
SEED = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is trained."""

    steps: int
    """The most steps; without a goal, all of them are timed."""
    goal: float | None
    more: Sequence[str] = ()
    """More arguments of the trainer."""


SMALL = ("--group-size", "4", "--batch-size", "4", "--epochs", "1")
FULL = Plan(200, GOAL)
QUICK = Plan(3, None, SMALL)
SMOKE = Plan(1, None, ("--group-size", "2", "--batch-size", "1", "--epochs", "1", "--every-group"))


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as folder:
        turns = await train(Path(folder), 0, plan)
        overlapping = await train(Path(folder), ETA, plan)
    arrived = [reached(each, plan) for each in (turns, overlapping)]
    report(
        "Asynchronous against synchronous training",
        given,
        {"goal": plan.goal, "eta": ETA, "workers": WORKERS, "seed": SEED},
        {
            "speedup": turns["minutes"] / overlapping["minutes"] if all(arrived) else None,
            "sync_reward": last_reward(turns),
            "async_reward": last_reward(overlapping),
            "sync_minutes": turns["minutes"],
            "async_minutes": overlapping["minutes"],
            "sync_steps": turns["steps"],
            "async_steps": overlapping["steps"],
        },
        {"speedup": ">= 1.3"},
    )


async def train(folder: Path, eta: int, plan: Plan) -> dict:
    """Train in a separate process, and return its report."""
    figures = folder / f"eta-{eta}.json"
    options = {
        "--json": figures,
        "--out": folder / str(eta),
        "--environment": "slow",
        "--plug-in": EXAMPLES / "environments" / "arithmetic",
        "--max-staleness": eta,
        "--seed": SEED,
        "--workers": WORKERS,
        "--evaluations": 0,
        "--steps": plan.steps,
        "--target": plan.goal or NEVER,
        "--minutes": MINUTES,
    }
    given = [str(part) for option in options.items() for part in option]
    command = [sys.executable, str(EXAMPLES / "train_calc.py"), *given, *plan.more]
    await anyio.run_process(command, stdout=None, stderr=None)
    return json.loads(await anyio.Path(figures).read_text())


def reached(figures: dict, plan: Plan) -> bool:
    return figures["steps"] == plan.steps if plan.goal is None else last_reward(figures) >= plan.goal


def last_reward(figures: dict) -> float:
    return mean(figures["rewards"][-2:])


if __name__ == "__main__":
    run(main, __doc__ or "")
