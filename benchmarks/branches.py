"""Measure how many sampled tokens a policy takes to learn a task, with trees as groups against flat groups.

Run: python benchmarks/branches.py [--json FILE] [--quick | --smoke]

A policy of one softmax for each turn learns by REINFORCE. The service's own functions choose where the branches
begin (`groups.branch_points`) and compute the advantages (`groups.leave_one_out`). A turn is one of four actions of
equal length, and a rollout succeeds if all its turns are right. A batch has four groups of 16. Learning ends
when the policy succeeds nine times of ten. Each token is trained on once, in the sample that sampled it. Figures are
ratios of the tokens sampled until then, trees over flat groups, medians over seeds:

- `even`: eight turns that are equally hard; `hard`: two of eight are hard; `long`: sixteen turns;
- `half`: 8 of 16 samples run from the task, and the others begin at `uncertain` turns; `quarter`: 4 do;
- `tool_error`: 8 of 16 run from the task, and the others begin at turns whose call failed, as each wrong one does;
- `by_token`: a step is the mean over the tokens of the batch, as in DAPO; `by_sample`: the mean over its samples, so
  that a tree, which has fewer tokens, takes smaller steps;
- `tokens_vs_flat`: the median of `half_by_token` over the three tasks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio.to_thread
import numpy as np
from common import Options, report, run
from numpy.typing import NDArray

from api_schemas.runs import BranchAt
from api_schemas.trajectories import FinishReason, ForkReason, Segment, Trajectory
from rollout_service.groups.branching import branch_points
from rollout_service.groups.statistics import leave_one_out

ACTIONS, GROUP, GROUPS = 4, 16, 4
RATE = 8.0
LEARNED = 0.9
MOST_STEPS = 2_000
TASKS: Mapping[str, Sequence[float]] = {
    "even": [0.75] * 8,
    "hard": [0.95, 0.95, 0.4, 0.95, 0.95, 0.4, 0.95, 0.95],
    "long": [0.85] * 16,
}
"""How likely the right action of each turn is at first."""
TREES: Mapping[str, tuple[int, BranchAt]] = {
    "half": (GROUP // 2, BranchAt.UNCERTAIN),
    "quarter": (GROUP // 4, BranchAt.UNCERTAIN),
    "tool_error": (GROUP // 2, BranchAt.TOOL_ERROR),
}
"""How many samples of a group are roots, and where the others begin."""
FLAT = (GROUP, BranchAt.UNCERTAIN)
AIMS = {"tokens_vs_flat": "< 1"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout: its actions, of which the first `begin` are another one's."""

    actions: Sequence[int]
    begin: int = 0

    @property
    def reward(self) -> float:
        return float(not any(self.actions))


class Policy:
    """A softmax over actions for each turn; action 0 is right."""

    def __init__(self, right: Sequence[float], seed: int) -> None:
        first = np.array(right)[:, None]
        self.logits = np.log(np.hstack([first, np.repeat((1 - first) / (ACTIONS - 1), ACTIONS - 1, axis=1)]))
        self._random = np.random.default_rng(seed)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """`[turns, actions]`."""
        weights = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    @property
    def has_learned(self) -> bool:
        return bool(self.probabilities[:, 0].prod() >= LEARNED)

    def sample(self, prefix: Sequence[int] = ()) -> Sample:
        """Sample the turns after a prefix."""
        rest = self.probabilities[len(prefix) :]
        drawn = [int(self._random.choice(ACTIONS, p=turn)) for turn in rest]
        return Sample([*prefix, *drawn], len(prefix))

    def trajectory(self, sample: Sample) -> Trajectory:
        """Return a rollout from the task, with a token for each turn."""
        turns = range(len(sample.actions))
        logprobs = np.log(self.probabilities)
        segment = Segment.model_construct(
            token_ids=[0, *sample.actions],
            loss_mask=[0, *(1 for _ in turns)],
            logprobs=[0.0, *(float(logprobs[turn, action]) for turn, action in enumerate(sample.actions))],
            versions=[-1, *(0 for _ in turns)],
            turn_ids=[-1, *turns],
            fork_reason=ForkReason.FIRST,
        )
        return Trajectory.model_construct(
            segments=[segment],
            finish_reasons=[FinishReason.STOP for _ in turns],
            tool_error_turns=[turn for turn, action in enumerate(sample.actions) if action],
        )

    def group(self, roots: int, at: BranchAt) -> list[Sample]:
        """Sample a group of which so many samples are roots."""
        samples = [self.sample() for _ in range(roots)]
        made = [(str(number), self.trajectory(sample)) for number, sample in enumerate(samples)]
        points = branch_points(made, GROUP - roots, at)
        branches = [self.sample(samples[int(point.rollout_id)].actions[: point.turn]) for point in points if point]
        return [*samples, *branches]

    def gradient(self, group: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the sum over the group's own turns of advantage times the gradient of the log-probability."""
        total, probabilities = np.zeros_like(self.logits), self.probabilities
        for sample, advantage in zip(group, leave_one_out([one.reward for one in group]), strict=True):
            for turn in range(sample.begin, len(sample.actions)):
                total[turn] -= (advantage or 0.0) * probabilities[turn]
                total[turn, sample.actions[turn]] += advantage or 0.0
        return total


def tokens_to_learn(right: Sequence[float], shape: tuple[int, BranchAt], by_token: bool, seed: int) -> int:
    """Return how many turns are sampled until the policy has learned."""
    policy, sampled = Policy(right, seed), 0
    for _ in range(MOST_STEPS):
        if policy.has_learned:
            return sampled
        groups = [policy.group(*shape) for _ in range(GROUPS)]
        turns = sum(len(one.actions) - one.begin for group in groups for one in group)
        sampled += turns
        size = turns / len(right) if by_token else GROUPS * GROUP
        policy.logits += RATE * sum(policy.gradient(group) for group in groups) / size
    raise RuntimeError(f"the policy had not learned after {MOST_STEPS} steps")


def ratios(seeds: int) -> dict[str, float]:
    found = {}
    for task, right in TASKS.items():
        for loss, by_token in (("by_token", True), ("by_sample", False)):
            flat = statistics.median(tokens_to_learn(right, FLAT, by_token, seed) for seed in range(seeds))
            for name, shape in TREES.items():
                tree = statistics.median(tokens_to_learn(right, shape, by_token, s) for s in range(seeds))
                found[f"{task}_{name}_{loss}"] = tree / flat
    return found


async def main(given: Options) -> None:
    seeds = given.plan(31, 7, 1)
    figures = await anyio.to_thread.run_sync(ratios, seeds)
    headline = statistics.median(figures[f"{task}_half_by_token"] for task in TASKS)
    report("Trees as groups", given, {"seeds": seeds}, {"tokens_vs_flat": headline} | figures, AIMS)


if __name__ == "__main__":
    run(main, "Compare trees with flat groups.")
