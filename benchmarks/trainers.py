"""Train with the real trainers' own code, and compare every step with independent computations.

Run: python benchmarks/trainers.py [--json FILE] [--quick | --smoke]

It needs scripts/install-trainers. Each trainer runs `rollout-service trainer check` against one service with the
embedded engine and Apptainer sandboxes, on the same tasks of `calc` in every step, from the policy `calc-base`.

- `trainers`: how many trainers were run;
- `max_logprob_diff`: the largest difference of a sampled token's log-probability, in the engine and in torch;
- `wrong_advantages`: rows whose advantage, as the trainer computed it, is not that of an independent computation;
  `wrong_rows`: rows that are not a segment of a rollout;
- `rising`: trainers with a higher reward in the last step than in the first;
- `*_max_logprob_diff`, `*_reward_before`, `*_reward_after`, `*_seconds`: the same for each trainer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from common import Options, folder_kept_on_error, report, run

from rollout_service.cli.server_child import running_server
from rollout_service.cli.trainer import TRAINERS, run_check

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
CUDA_ONLY = ROOT / "tests" / "support" / "adapters" / "cuda_only"
AIMS = {
    "trainers": ">= 6",
    "max_logprob_diff": "<= 1e-4",
    "wrong_advantages": "0",
    "wrong_rows": "0",
    "rising": ">= 4",
}
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Which trainers take how many steps, with how many tasks and rollouts of each."""

    trainers: tuple[str, ...] = TRAINERS
    steps: int = 10
    tasks: int = 6
    group: int = 6


async def main(given: Options) -> None:
    plan = given.plan(Plan(), Plan(("areal", "trl"), 3, 4, 4), Plan(("areal",), 1, 2, 2))
    flags = [f"--steps={plan.steps}", f"--tasks={plan.tasks}", f"--group={plan.group}"]
    reports = {}
    with folder_kept_on_error("trainers") as folder:
        for name in plan.trainers:
            async with running_server(folder / name, ["--model", "calc-base", "--sandbox", "apptainer"]) as client:
                environ = os.environ | ENVIRON | {"ROLLOUT_URL": client.base_url}
                if name == "openrlhf":
                    environ |= {"PYTHONPATH": str(CUDA_ONLY)}
                check = partial(run_check, str(PYTHON), name, flags, environ)
                reports[name] = await anyio.to_thread.run_sync(check, abandon_on_cancel=True)
    report("Trainers", given, settings_of(plan, reports), figures_of(reports), AIMS)


def settings_of(plan: Plan, reports: dict[str, Any]) -> dict[str, Any]:
    return {
        "steps": plan.steps,
        "rollouts_per_step": plan.tasks * plan.group,
        "versions": {name: one["version"] for name, one in reports.items()},
        "rewards": {name: [step["reward"] for step in one["steps"]] for name, one in reports.items()},
        "failures": {name: one["failure"] for name, one in reports.items()},
        "problems": {name: one["problems"] for name, one in reports.items()},
    }


def figures_of(reports: dict[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {
        "trainers": len(reports),
        "max_logprob_diff": max(one["max_logprob_diff"] for one in reports.values()),
        "wrong_advantages": sum(one["wrong_advantages"] for one in reports.values()),
        "wrong_rows": sum(step["wrong_rows"] for one in reports.values() for step in one["steps"]),
        "rising": sum(one["reward_after"] > one["reward_before"] for one in reports.values()),
    }
    for name, one in reports.items():
        figures |= {f"{name}_{key}": one[key] for key in ("max_logprob_diff", "reward_before", "reward_after")}
        figures[f"{name}_seconds"] = sum(step["seconds"] for step in one["steps"])
    return figures


if __name__ == "__main__":
    run(main, "Train with the real trainers' own code.")
