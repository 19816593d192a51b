"""DAPO's loss with AReaL's decoupled objective, as one pure function.

Three policies take part. The *behaviour* policy sampled a token (its log-probability came from the engine, with the
weights of that time), the *proximal* one is the trainer's policy when the step began, and the *current* one is what
is being changed. The ratio current / proximal is clipped; the ratio proximal / behaviour only weighs, is capped, and
has no gradient. Guarantees: every trained token counts the same, however long its sample is; with one update per
batch and no staleness this is the plain policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """The bounds of the two ratios."""

    low: float = 0.2
    high: float = 0.28
    """Larger than `low`, so that unlikely tokens can become likely (DAPO's clip-higher)."""
    weight: float = 2.0
    """The largest weight of proximal / behaviour (AReaL)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The value to minimise, and what to watch."""

    value: Tensor
    clipped: float
    """Share of tokens whose gradient the clip took away."""
    capped: float
    """Share of tokens whose weight was cut to the cap."""


def dapo_loss(
    current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, tokens: int, clip: Clip
) -> Loss:
    """The loss of these tokens; all tensors have one entry a sampled token.

    `tokens` is the number to divide by: that of all tokens of the update, also when it is made in portions.
    """
    ratio = torch.exp(current - proximal)
    weight = torch.exp(proximal - behaviour).detach()
    free = ratio * advantages
    bound = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    objective = weight.clamp(max=clip.weight) * torch.minimum(free, bound)
    return Loss(
        -objective.sum() / tokens,
        (bound < free).float().mean().item(),
        (weight > clip.weight).float().mean().item(),
    )
