"""Measure the wall time to the same reward of asynchronous against synchronous training, with long-tailed rollouts.

Run: python benchmarks/asynchrony.py [--json FILE] [--quick]
It needs what `scripts/train --install` installs, and Apptainer.

Both train the same policy, from the same seed, with the reference trainer on the environment `slow`, whose tool takes
a lognormal time: 1 s at the median, 2 s on average, up to 30 s. Synchronously, every step waits for its slowest
rollout. The clock stops when the mean reward of two batches has reached the goal. `speedup` is the ratio of the two
times, or null if either run does not reach the goal in the time allowed. `--quick` times three steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

import anyio
from common import HERE, Options, report, run

EXAMPLES = HERE.parent / "examples"
GOAL, MINUTES, STEPS = 0.9, 20.0, 200
QUICK_STEPS = 3
ETA = 2
WORKERS = 48
"""Agents at once; most of them are waiting for their tool."""
SEED = 3


async def main(given: Options) -> None:
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as folder:
        turns = await train(Path(folder), 0, quick=given.quick)
        overlapping = await train(Path(folder), ETA, quick=given.quick)
    arrived = [reached(each, quick=given.quick) for each in (turns, overlapping)]
    report(
        "Asynchronous against synchronous training",
        given,
        {"goal": None if given.quick else GOAL, "eta": ETA, "workers": WORKERS, "seed": SEED},
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


async def train(folder: Path, eta: int, *, quick: bool) -> dict:
    """Train in a separate process, and return its report."""
    figures = folder / f"eta-{eta}.json"
    steps, target = (QUICK_STEPS, 2.0) if quick else (STEPS, GOAL)
    command = [
        sys.executable,
        str(EXAMPLES / "train_calc.py"),
        "--json",
        str(figures),
        "--out",
        str(folder / f"{eta}"),
    ]
    command += ["--environment", "slow", "--plug-in", str(EXAMPLES / "environments" / "arithmetic")]
    command += [
        "--max-staleness",
        str(eta),
        "--seed",
        str(SEED),
        "--workers",
        str(WORKERS),
        "--evaluations",
        "0",
    ]
    command += ["--steps", str(steps), "--target", str(target), "--minutes", str(MINUTES)]
    if quick:
        command += ["--group-size", "4", "--batch-size", "4", "--epochs", "1"]
    await anyio.run_process(command, stdout=None, stderr=None)
    return json.loads(await anyio.Path(figures).read_text())


def reached(figures: dict, *, quick: bool) -> bool:
    return figures["steps"] == QUICK_STEPS if quick else last_reward(figures) >= GOAL


def last_reward(figures: dict) -> float:
    return mean(figures["rewards"][-2:])


if __name__ == "__main__":
    run(main, __doc__ or "")
