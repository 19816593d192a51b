"""Rewards for handing on work, in addition to the reward of the outcome, whose weights fade during training.

An agent with sub-agents has three rewards: `perf` is that of the outcome, `parallel` is for handing on work at the same
time, and `finish` is the share of it that was done. A run adds them with weights that follow the trainer's version.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from api_schemas.base import Count, CountOrZero, Number, StrEnum, WireModel

Weight = Annotated[float, Number, Field(ge=0.0, le=1e6)]


class RewardPart(StrEnum):
    """A part of the reward that filters and statistics can look at."""

    PERF = "perf"
    """The environment's reward."""
    PARALLEL = "parallel"
    """The reward for handing on work, as the run measures it."""
    FINISH = "finish"
    """The share of assigned tasks whose result is valid."""
    REWARD = "reward"
    """The weighted total, before penalties."""


class ParallelMeasure(StrEnum):
    """How the reward for handing on work is measured, from 0 to 1."""

    COUNT = "count"
    """By the number of different tasks that were assigned, in one turn or one after the other."""
    WIDTH = "width"
    """By the most different tasks that were assigned in one turn; one at a time earns nothing."""


class RewardForm(StrEnum):
    """How the parts make a total, with l1 and l2 for the present values of `lambda1` and `lambda2`."""

    REPORT = "report"
    """perf + l1 * parallel + l2 * finish (Kimi K2.5, arXiv 2602.02276, section 3)."""
    OPEN_PARL = "open_parl"
    """perf + l1 * parallel + l1 * finish (open-parl, in the source after its release 0.1.0)."""
    OPEN_PARL_MIX = "open_parl_mix"
    """(1 - l1) * perf + l1 * parallel (open-parl 0.1.0)."""


class Annealed(WireModel):
    """A weight that goes in a straight line from one value to another."""

    init: Weight
    """The value up to the schedule's start."""
    end: Weight = 0.0
    """The value from the schedule's end on. With `init` as `end`, the weight is constant."""


class Auxiliary(WireModel):
    """The weights of the rewards for handing on work, which follow the trainer's version.

    A group takes the weights of the version at which it is closed.
    """

    lambda1: Annealed
    """The weight of `parallel`."""
    lambda2: Annealed | None = None
    """The weight of `finish`; required by the form `report`, and refused by the others, which have only one weight."""
    start: CountOrZero | None = None
    """The version of the trainer at which the weights begin to change; null means the run's first version."""
    length: Count
    """The number of versions over which they change."""
    parallel: ParallelMeasure = ParallelMeasure.COUNT
    form: RewardForm = RewardForm.REPORT

    @model_validator(mode="after")
    def _weights_fit_the_form(self) -> Self:
        if (self.lambda2 is None) is (self.form is RewardForm.REPORT):
            raise ValueError(
                "the form report needs lambda2"
                if self.lambda2 is None
                else f"the form {self.form} has only one weight, so leave lambda2 out"
            )
        if self.form is RewardForm.OPEN_PARL_MIX and max(self.lambda1.init, self.lambda1.end) > 1:
            raise ValueError("with the form open_parl_mix, lambda1 is a share and may not exceed 1")
        return self


class RewardWeights(WireModel):
    """The weights in the total of a sample's reward; they are those of the whole group."""

    perf: float
    parallel: float
    finish: float
    at_version: int
    """The trainer's version from which they follow: the one at which the group was closed."""
