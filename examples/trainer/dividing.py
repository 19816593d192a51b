"""Training a policy that hands on work: what it asks of its run, and what there is to watch.

The policy is rewarded for handing on work at first (PARL, Kimi K2.5, arXiv 2602.02276): the weights of these rewards
fall to 0 over the first steps of the training, so that in the end the outcome alone counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from api_schemas.rollouts import Rollout
from api_schemas.runs import Advantages
from api_schemas.runs.auxiliary import Annealed, Auxiliary, ParallelMeasure
from rollout_service.groups.statistics import parallel_figures, work_sums

ENVIRONMENTS = ("pointers", "split")
"""The built-in environments that are worth dividing; a policy for them ships with the service."""
NEVER = 10**6
"""So many steps that weights which fall over them stay."""

FIGURES = ("critical_steps", "scheduled_steps", "assigns_per_turn", "assigns_per_rollout", "width_max")
"""What is kept of `api_schemas.rollouts.figures.ParallelFigures` after a training."""


@dataclass(frozen=True, slots=True)
class Dividing:
    """The rewards for handing on work."""

    auxiliary: str = "none"
    """`none`, `annealed` over the first steps, or `constant`."""
    measure: str = "width"
    """`width` or `count`; see docs/explanation/parallel-rewards.md."""
    lambda1: float = 0.3
    lambda2: float = 0.2
    anneal: int = 20
    """The number of steps over which the weights fall to 0."""

    def order(self) -> Auxiliary | None:
        """Return what to ask of the run."""
        if self.auxiliary == "none":
            return None
        ends = (0.0, 0.0) if self.auxiliary == "annealed" else (self.lambda1, self.lambda2)
        return Auxiliary(
            lambda1=Annealed(init=self.lambda1, end=ends[0]),
            lambda2=Annealed(init=self.lambda2, end=ends[1]),
            length=self.anneal if self.auxiliary == "annealed" else NEVER,
            parallel=ParallelMeasure(self.measure),
        )


def advantages_of(environment: str) -> Advantages:
    """Return the kind of advantages: dividing by the standard deviation would undo the fall of the weights."""
    return Advantages.LEAVE_ONE_OUT if environment in ENVIRONMENTS else Advantages.GROUP_NORM


def division_of(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return how scored rollouts divide their work, by the service's own figures; nothing without sub-agents."""
    figures = parallel_figures(work_sums(rollouts))
    values = {} if figures is None else {name: getattr(figures, name) for name in FIGURES}
    return {name: value for name, value in values.items() if value is not None}
