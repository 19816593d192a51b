"""DAPO's loss with AReaL's decoupled objective, as one pure function.

Three policies take part. The *behavior* policy sampled a token: its log-probability came from the engine, with the
weights of that time. The *proximal* policy is the trainer's when the step began. The *current* policy is being changed.
The ratio current / proximal is clipped. The ratio proximal / behavior is only a weight: it is capped, and has no
gradient.

Guarantees: every trained token counts the same, however long its sample is. With one update per batch and no staleness,
this is the plain policy gradient.
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
    """The largest weight of proximal / behavior (AReaL)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The value to minimize, and figures to watch."""

    value: Tensor
    clipped: float
    """The share of tokens whose gradient the clip removed."""
    capped: float
    """The share of tokens whose weight was reduced to the cap."""


def dapo_loss(current: Tensor, proximal: Tensor, behavior: Tensor, advantages: Tensor, tokens: int, clip: Clip) -> Loss:
    """Return the loss of these tokens; all tensors have one entry per sampled token.

    `tokens` is the divisor: the number of tokens in the whole update, even if it is computed in portions.
    """
    ratio = torch.exp(current - proximal)
    weight = torch.exp(proximal - behavior).detach()
    free = ratio * advantages
    bound = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    objective = weight.clamp(max=clip.weight) * torch.minimum(free, bound)
    return Loss(
        -objective.sum() / tokens,
        (bound < free).float().mean().item(),
        (weight > clip.weight).float().mean().item(),
    )
