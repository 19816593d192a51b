"""Measure what environments cost: starts, evaluations, images, and many tasks of software repair at once.

Run: python benchmarks/environments.py [--json FILE] [--quick | --smoke]

Everything is real but the model: a service with default sandboxes in Apptainer, without warm ones, and an engine that
answers at once from a script. It needs the image `base`, and makes two tasks of software repair if they are missing.

- `start_ms_*`: from the beginning of a rollout's init stage until its agent's first command runs, which prints the
  time; `start_submitted_ms_*` begins with the submission. The image is unpacked already, and no sandbox is warm.
  `limit_start_ms`: the same command in a bare `apptainer exec`, which mounts the image file, between the rollouts.
- `evaluate_overhead_ms_*`: the evaluate stage without the time of the grader by its own clock; for `swe`, without the
  time of the same tests by themselves in a sandbox (`grader_ms_swe`), right before. `_same` and `_fresh` tell where the
  grader runs; `harbor_` is a verifier in Harbor's format. The one without a kind is over as many evaluations of each.
- `image_*`, `build_*`: images from Dockerfiles on the image `base`, built one after the other. All share a layer, and
  every ten share another. `limit_images_mb` has the base and each distinct layer once; `layers_mb` is the cache of
  unpacked layers. `build_s_*` leaves out the first build, which unpacks the base and makes the shared layer.
- `rollouts_per_minute`: many tasks of software repair at once. One agent in four repairs nothing, and the benchmark
  fails unless exactly the others are rewarded. `limit_rollouts_per_minute`: each core runs one task's tests after the
  other, and does nothing else.
- `cpu_s_per_*`: the CPU time of all processes, engine and benchmark included. On a busy machine, trust these.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from common import Options, folder_kept_on_error, report, run
from support.accounting import Account, account
from support.environments.image_costs import image_figures
from support.environments.played_service import PlayedService, played_service
from support.environments.rollout_costs import (
    COMMANDS,
    Figures,
    environments_with,
    overhead_figures,
    overhead_ms,
    play_each,
    start_figures,
)
from support.environments.swe_costs import (
    FOLDER,
    SweInstance,
    many_at_once,
    one_by_one,
    read_instances,
)


@dataclass(frozen=True, slots=True)
class Plan:
    rollouts: int
    """Rollouts of each kind, one after the other."""
    swe_rollouts: int
    """The same for each task of software repair."""
    at_once: int
    images: int


FULL = Plan(rollouts=20, swe_rollouts=8, at_once=32, images=50)
QUICK = Plan(rollouts=3, swe_rollouts=1, at_once=4, images=6)
SMOKE = Plan(rollouts=1, swe_rollouts=1, at_once=4, images=2)


async def main(given: Options) -> None:
    plan = given.plan(FULL, QUICK, SMOKE)
    instances = await read_instances()
    with account() as counted:
        figures = await rollouts(counted, plan, instances)
        before = counted.cpu_seconds()
        figures |= await image_figures(plan.images)
        figures["cpu_s_per_image"] = (counted.cpu_seconds() - before) / plan.images
    settings = {"cpu_time_from": counted.source, "swe": [one.fields["instance_id"] for one in instances]}
    report("What environments cost", given, settings, dict(sorted(figures.items())), {})


async def rollouts(counted: Account, plan: Plan, instances: list[SweInstance]) -> Figures:
    """Measure everything that runs in a service, and its limits by themselves."""
    commands = COMMANDS | {name: told for one in instances for name, told in one.commands().items()}
    with folder_kept_on_error("rollout-benchmark-") as state:
        async with played_service(state, environments_with(FOLDER), commands, at_once=plan.at_once) as service:
            figures, alone_ms = await without_neighbors(service, plan, instances)
            before = counted.cpu_seconds()
            figures |= await many_at_once(service, instances, alone_ms, plan.at_once)
            figures["cpu_s_per_swe_rollout"] = (counted.cpu_seconds() - before) / plan.at_once
    return figures


async def without_neighbors(service: PlayedService, plan: Plan, instances: list[SweInstance]) -> tuple[Figures, float]:
    """Measure rollouts one after the other; return the time of a repair's tests by themselves too."""
    played, bare = await play_each(service, plan.rollouts)
    swe = await one_by_one(service, instances, plan.swe_rollouts)
    costs = {kind: [overhead_ms(one) for one in rollouts] for kind, rollouts in played.items()}
    figures = start_figures(played, bare) | overhead_figures(costs | {"swe": swe.overheads})
    figures["start_ms_p50_swe"] = statistics.median(swe.starts)
    figures["grader_ms_swe"] = statistics.fmean(swe.alone)
    return figures, statistics.fmean(swe.alone)


if __name__ == "__main__":
    run(main, "Measure what environments cost.")
