"""Measure checkpoints on held-out problems: `python -m training.evaluate FOLDER... [--task parl|live]`."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import torch

from rollout_service.environments.builtin.calc import sample_problems
from rollout_service.tokens import ChatRenderer
from training.model import load_model
from training.prompts import CALC_SETUP
from training.rollouts import Attempt, roll_out

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--task", choices=("calc", "parl", "live"), default="calc")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    of_task = measure if arguments.task == "calc" else import_module(f"training.{arguments.task}.evaluate").measure
    for folder in arguments.folders:
        print(json.dumps({"folder": str(folder), **of_task(folder, arguments.problems)}), flush=True)


def measure(folder: Path, count: int) -> dict[str, float]:
    """Return the success, greedy and at temperature 1, and the share of groups of 8 that are worth training on."""
    torch.manual_seed(0)
    model, renderer = load_model(folder), ChatRenderer.load(folder)
    problems = sample_problems(4242, count, held_out=True)
    greedy = roll_out(model, renderer, CALC_SETUP, problems, 0.0)
    sampled = roll_out(model, renderer, CALC_SETUP, problems, 1.0)
    grouped = roll_out(model, renderer, CALC_SETUP, [p for p in problems[:32] for _ in range(GROUP)], 1.0)
    wins = [sum(a.success for a in grouped[i : i + GROUP]) for i in range(0, len(grouped), GROUP)]
    return {
        "greedy": _share(greedy),
        "temperature_1": _share(sampled),
        "greedy_right_call": sum(a.right_call for a in greedy) / count,
        "mixed_groups": sum(0 < n < GROUP for n in wins) / len(wins),
        "longest": max(len(a.conversation.prompt()) for a in greedy if not a.done)
        if any(not a.done for a in greedy)
        else max(len(a.conversation.trajectory().segments[-1].token_ids) for a in greedy),
    }


def _share(attempts: list[Attempt]) -> float:
    return round(sum(attempt.success for attempt in attempts) / len(attempts), 4)


if __name__ == "__main__":
    main()
