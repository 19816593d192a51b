"""Rewards for handing on work: their raw values, their weights at a version of the trainer, and the weighted total.

Weights depend on nothing but the run's request and the trainer's version, and lie between their two ends. A part whose
weight is 0 is not added, so that at weights of 0 the total is the environment's reward, bit for bit.

The formulas, for n different tasks that ran and w, the most of them in one turn:

- parallel, by count: min(n, N) / N with N = `max_assigns`; by width: max(0, min(w, W) - 1) / (W - 1) with W =
  `max_width`. If only one may run at once, no width is possible, and it is 0.
- finish: valid results / tasks that ran, repeated ones included; 0 if none ran.
- a weight at version v: init + (end - init) * clamp((v - start) / length, 0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add

from api_schemas.rollouts.trees import Work
from api_schemas.runs import Advantages, RunRequest
from api_schemas.runs.auxiliary import Annealed, Auxiliary, ParallelMeasure, RewardForm, RewardPart, RewardWeights

PERF = "perf"
FINISH = "finish"
MEASURES = {ParallelMeasure.COUNT: "parallel", ParallelMeasure.WIDTH: "width"}
"""Names among the parts of a rollout's reward."""
NO_PARTS = "no_reward_parts"
"""Masks a sample without rewards for handing on work, although its run weighs them."""


def raw_parts(work: Work, *, max_assigns: int, max_width: int) -> dict[str, float]:
    """Return the rewards for handing on work, each from 0 to 1.

    `max_assigns` is the number of tasks that earns all of the first, and `max_width` that of the second.
    """
    if max_assigns < 1 or max_width < 1:
        raise ValueError("max_assigns and max_width must be at least 1")
    assigns = work.assigns
    different = assigns.executed - assigns.duplicate
    width = min(work.width_max, max_width)
    return {
        MEASURES[ParallelMeasure.COUNT]: min(different, max_assigns) / max_assigns,
        MEASURES[ParallelMeasure.WIDTH]: (width - 1) / (max_width - 1) if width > 1 else 0.0,
        FINISH: assigns.valid / assigns.executed if assigns.executed else 0.0,
    }


def rescored_parts(recorded: Mapping[str, float], reward: float) -> dict[str, float]:
    """Return the parts of a new reward: the outcome's is new, those for handing on work stay."""
    kept = {name: recorded[name] for name in (*MEASURES.values(), FINISH) if name in recorded}
    return {PERF: reward, **kept} if kept else {}


def reward_weights(request: RunRequest, version: int) -> RewardWeights | None:
    """Return the weights at this version of the trainer; None for a run without an auxiliary reward."""
    auxiliary = request.auxiliary
    if auxiliary is None:
        return None
    start = schedule_start(request, auxiliary)
    first = annealed(auxiliary.lambda1, version - start, auxiliary.length)
    if auxiliary.form is RewardForm.OPEN_PARL_MIX:
        return RewardWeights(perf=1.0 - first, parallel=first, finish=0.0, at_version=version)
    second = first if auxiliary.lambda2 is None else annealed(auxiliary.lambda2, version - start, auxiliary.length)
    return RewardWeights(perf=1.0, parallel=first, finish=second, at_version=version)


def schedule_start(request: RunRequest, auxiliary: Auxiliary) -> int:
    return request.version if auxiliary.start is None else auxiliary.start


def is_annealed(auxiliary: Auxiliary) -> bool:
    weights = (auxiliary.lambda1, auxiliary.lambda2)
    return any(weight is not None and weight.init != weight.end for weight in weights)


def annealed(weight: Annealed, elapsed: int, length: int) -> float:
    """Return a weight `elapsed` versions after the start of its schedule."""
    if elapsed <= 0:
        return weight.init
    if elapsed >= length:
        return weight.end
    between = weight.init + (weight.end - weight.init) * (elapsed / length)
    low, high = sorted((weight.init, weight.end))
    return min(max(between, low), high)


def weighted_parts(weights: RewardWeights) -> dict[RewardPart, float]:
    by_part = {
        RewardPart.PERF: weights.perf,
        RewardPart.PARALLEL: weights.parallel,
        RewardPart.FINISH: weights.finish,
    }
    return {part: weight for part, weight in by_part.items() if weight != 0}


def weighted_total(weights: RewardWeights, parts: Mapping[RewardPart, float]) -> float:
    return reduce(add, (weight * parts[part] for part, weight in weighted_parts(weights).items()))


def run_warnings(request: RunRequest, total: int | None) -> list[str]:
    """Return warnings about what is allowed, but may not do what it is meant to do.

    `total` is the number of the run's tasks over all epochs, None if unbounded.
    """
    return [*_of_live(request), *_of_auxiliary(request, total)]


def _of_live(request: RunRequest) -> Iterator[str]:
    if request.live is not None and request.group_size > 1:
        yield (
            f"group_size: the run takes only sessions that were opened with a `group`, once {request.group_size} of a "
            "group have ended. With a group_size of 1 it takes every session."
        )


def _of_auxiliary(request: RunRequest, total: int | None) -> Iterator[str]:
    auxiliary = request.auxiliary
    if auxiliary is None:
        return
    if request.advantages is Advantages.GROUP_NORM:
        yield (
            "advantages: group_norm divides by the standard deviation of the total, which undoes the annealing: where "
            "outcomes are alike, advantages are as large as before until the weights are exactly 0. Use leave_one_out, "
            "or parts_norm, which normalizes each part alone."
        )
    if total is None or not is_annealed(auxiliary):
        return
    end = schedule_start(request, auxiliary) + auxiliary.length
    last = request.version + math.ceil(total / request.batch_size)
    if end > last:
        yield (
            f"auxiliary.length: the weights reach their end at version {end}, but the run's tasks are enough for "
            f"{last - request.version} batches at most, so with a version for each batch it ends at version {last}. "
            "Shorten the schedule, or raise the epochs."
        )
