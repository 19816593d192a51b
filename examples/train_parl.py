"""Compare ways to reward an agent for handing on work, with the reference trainer: five arms, with equal seeds.

    python examples/train_parl.py                              every arm with one seed, two of them with three
    python examples/train_parl.py --arms annealed,none --seeds 1

Each training is a process of `train_calc.py` with a service and two engines of its own: one for the policy, one for its
frozen sub-agents. Started again with the same `--out`, it does only what is missing.

What to look for: with rewards that fade (`annealed`) the policy learns to hand on work sooner than with none; with
rewards that stay (`constant`) it hands on more than it needs; with shuffled rewards it learns nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from trainer.curves import draw_multiples, read_points

TRAINER = Path(__file__).with_name("train_calc.py")
ARMS: Mapping[str, Sequence[str]] = {
    "annealed": ("--auxiliary", "annealed", "--measure", "width"),
    "none": ("--auxiliary", "none"),
    "count": ("--auxiliary", "annealed", "--measure", "count"),
    "constant": ("--auxiliary", "constant", "--measure", "width"),
    "shuffled": ("--auxiliary", "none", "--shuffle-rewards"),
}
RECIPE = ("--learning-rate", "1e-4", "--updates", "2", "--horizon", "1000", "--anneal", "12")
"""Smaller steps than the trainer's own, which learns the task in seven: there would be little to compare."""
REPEATED = ("annealed", "none")
"""The arms that are run with all seeds; the others are run with the first."""
GOOD = 0.75
"""The reward whose time to be reached is compared."""
SMOOTHED = 3
"""The number of updates over which it is the mean."""
DRAWN = ("reward", "critical_steps", "assigns_per_turn", "width", "valid_share", "duplicate_share")


@dataclass(frozen=True, slots=True)
class Training:
    """One arm with one seed."""

    arm: str
    seed: int
    figures: Mapping[str, object]
    points: Sequence[Mapping[str, float]]

    @property
    def updates_to_good(self) -> int | None:
        """The number of updates after which the reward was good; None if it never was."""
        return updates_to([point["reward"] for point in self.points])


def updates_to(rewards: Sequence[float]) -> int | None:
    """Return after how many updates the mean of three rewards is first at least 0.75; None if it never is."""
    for last in range(SMOOTHED, len(rewards) + 1):
        if mean(rewards[last - SMOOTHED : last]) >= GOOD:
            return last
    return None


def train(arm: str, seed: int, options: argparse.Namespace) -> Training:
    """Run a training unless its figures are there; return them."""
    folder = options.out / f"{arm}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures.json"
    if not figures.exists():
        flags = ["--environment", "pointers", "--sandbox", "local", "--seed", str(seed), "--out", str(folder)]
        flags += ["--steps", str(options.steps), "--minutes", str(options.minutes), "--target", "2"]
        print(f"==> {arm}, seed {seed}", flush=True)
        command = [
            sys.executable,
            str(TRAINER),
            *flags,
            *RECIPE,
            *ARMS[arm],
            "--json",
            str(figures),
            *options.trainer,
        ]
        subprocess.run(command, check=True)
    return Training(arm, seed, json.loads(figures.read_text()), read_points(folder / "curve.jsonl"))


def summary(trainings: Sequence[Training]) -> dict[str, object]:
    """Return the medians of an arm over its seeds."""
    reached = [each.updates_to_good for each in trainings]
    known = [each for each in reached if each is not None]
    return {
        "seeds": len(trainings),
        "start_perf": _median(trainings, "reward_before"),
        "final_perf": _median(trainings, "final_reward"),
        "updates_to_075": median(known) if len(known) == len(reached) else None,
        "updates_to_075_of_seeds": reached,
        "final_critical_steps": _median(trainings, "final_critical_steps"),
        "assigns_per_turn": _median(trainings, "final_assigns_per_turn"),
        "assigns_per_rollout": _median(trainings, "final_assigns_per_rollout"),
        "minutes": _median(trainings, "minutes"),
    }


def _median(trainings: Sequence[Training], name: str) -> float | None:
    values = [value for each in trainings if isinstance(value := each.figures.get(name), int | float)]
    return median(values) if values else None


def mean_curve(trainings: Sequence[Training]) -> list[dict[str, float]]:
    """Return the mean of an arm's curves, as far as all of them go."""
    rows = zip(*(each.points for each in trainings), strict=False)
    return [
        {name: mean(point[name] for point in row) for name in row[0] if all(name in point for point in row)}
        for row in rows
    ]


def main(options: argparse.Namespace) -> None:
    seeds = range(options.seeds)
    trainings = [train(arm, seed, options) for seed in seeds for arm in options.arms if seed == 0 or arm in REPEATED]
    by_arm = {arm: [each for each in trainings if each.arm == arm] for arm in options.arms}
    plot = draw_multiples(
        {arm: mean_curve(some) for arm, some in by_arm.items()}, list(DRAWN), options.out / "arms.png"
    )
    summaries = {arm: summary(some) for arm, some in by_arm.items()}
    for arm, figures in summaries.items():
        print(f"{arm:9}", json.dumps(figures))
    print(f"curves: {plot}")
    if options.json:
        first = summaries.get("annealed") or next(iter(summaries.values()))
        none = summaries.get("none", {})
        figures = {**first, "none_updates_to_075": none.get("updates_to_075"), "arms": summaries}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arms", type=lambda text: text.split(","), default=list(ARMS), help=f"of {', '.join(ARMS)}")
    add("--seeds", type=int, default=3, help=f"of the arms {' and '.join(REPEATED)}; the others have one")
    add("--steps", type=int, default=24, help="of each training, at most")
    add("--minutes", type=float, default=20.0, help="of each training, at most")
    add("--out", type=Path, default=Path("parl-arms"), metavar="DIR", help="trainings and curves")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options, options_of_trainer = parser.parse_known_args()
    options.trainer = options_of_trainer
    if unknown := set(options.arms) - ARMS.keys():
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    return options


if __name__ == "__main__":
    main(parse())
