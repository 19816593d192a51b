"""Statistics of a group's rewards, advantages, and DAPO's penalty for length.

Guarantees: only samples with a reward enter any figure. None stands for "missing" wherever it goes in, and for "not
defined" wherever it comes out; nothing is filled in. Advantages of one group sum to 0 up to rounding.

The formulas, over the m rewards that are there, with mean mu and standard deviation sigma (dividing by m):

- group normalised, GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1): A_i = (r_i - mu) / sigma. Trainers that divide
  by m - 1 instead get values smaller by sqrt((m - 1) / m). No epsilon is added: where sigma is 0 no reward differs
  from mu, and the advantage is the numerator's own value, 0.
- leave-one-out, RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740, equation 6):
  A_i = r_i - mean of the others = m / (m - 1) * (r_i - mu).
- soft overlong punishment (DAPO, arXiv 2503.14476, equation 13).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout_service.groups.outcome import GroupOutcome

_NO_SPREAD = 1e-12
"""Standard deviations up to this, relative to the largest reward, are rounding."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """What a trainer may want to know of a group's rewards; None where no reward is there."""

    size: int
    usable: int
    mean: float | None
    std: float | None
    """Dividing by the number of usable samples."""
    lowest: float | None
    highest: float | None
    masked: Mapping[str, int] = field(default_factory=dict)
    """Samples that do not count, by reason."""


def group_statistics(group: GroupOutcome) -> GroupStatistics:
    """The statistics of a group."""
    rewards = group.rewards
    mean, std = _moments(rewards) if rewards else (None, None)
    return GroupStatistics(
        size=len(group.samples),
        usable=len(rewards),
        mean=mean,
        std=std,
        lowest=min(rewards, default=None),
        highest=max(rewards, default=None),
        masked=Counter(sample.masked for sample in group.samples if sample.masked is not None),
    )


def group_normalized(rewards: Sequence[float | None]) -> list[float | None]:
    """GRPO's advantages, one for each entry; None where the reward is missing, or is the only one."""
    present = [reward for reward in rewards if reward is not None]
    if len(present) < 2:
        return [None] * len(rewards)
    mean, std = _moments(present)
    if std <= _NO_SPREAD * max(map(abs, present)):
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else (reward - mean) / std for reward in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> list[float | None]:
    """RLOO's advantages, one for each entry; None where the reward is missing, or is the only one."""
    present = [reward for reward in rewards if reward is not None]
    if len(present) < 2:
        return [None] * len(rewards)
    mean, _ = _moments(present)
    scale = len(present) / (len(present) - 1)
    return [None if reward is None else scale * (reward - mean) for reward in rewards]


def soft_overlong_penalty(
    sampled_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> float:
    """What is added to a reward for its length: 0 down to `-penalty`.

    DAPO's equation 13 with L_max = `max_tokens` and L_cache = `buffer_tokens`: 0 up to L_max - L_cache, then a straight
    line to -1 at L_max, and -1 beyond; times `penalty`.
    """
    over = sampled_tokens - (max_tokens - buffer_tokens)
    if over <= 0:
        return 0.0
    return -penalty * min(1.0, over / buffer_tokens)


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (dividing by the number), by sums without loss."""
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
