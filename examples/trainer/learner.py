"""One step of the trainer: samples in, changed weights out.

Guarantee: a step depends only on the samples, the weights, the optimizer's state and the seed. With the weights and the
result of `state`, another process continues exactly as this one would have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .loss import Clip, dapo_loss
from .policy import Sample, distributions, load_policy, portions, sampled_logprobs


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters that a researcher changes first."""

    learning_rate: float = 3e-4
    warm_up: int = 2
    """The number of steps over which the learning rate rises."""
    horizon: int = 24
    """The step at which the learning rate has fallen to the share `last` of itself, where it stays."""
    last: float = 0.1
    epochs: int = 1
    """The number of passes over a batch."""
    updates: int = 4
    """The optimizer steps in an epoch. The clip has an effect only with more than one step per batch."""
    portion: int = 32
    """The samples in one forward pass, which affects only the memory."""
    discouragement: float = 0.3
    """The factor of negative advantages. 1 is DAPO; a smaller factor allows larger steps, which otherwise diverge by
    making samples ever more unlikely."""
    max_norm: float = 1.0
    temperature: float = 1.0
    clip: Clip = field(default_factory=Clip)

    def learning_rate_of(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1. It rises, then falls linearly."""
        left = 1.0 - min(1.0, step / self.horizon)
        return self.learning_rate * min(step / self.warm_up, self.last + (1.0 - self.last) * left, 1.0)


class Learner:
    def __init__(self, folder: Path, recipe: Recipe, *, seed: int = 0) -> None:
        self.model = load_policy(folder)
        self.recipe = recipe
        self.steps = 0
        """The number of steps so far, which is also the version of the weights."""
        self._random = random.Random(seed)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Change the weights, and return the figures to watch. Without samples, only the version rises."""
        version, self.steps = self.steps, self.steps + 1
        if not samples:
            return {"tokens": 0.0}
        self.model.train()
        several = self.recipe.updates * self.recipe.epochs > 1
        proximal = self._proximal(samples) if several else None
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_of(self.steps)
        watched = [self._update(part, proximal) for part in self._minibatches(samples)]
        tokens = float(sum(len(sample.behavior) for sample in samples))
        return {**_means(watched), **_staleness(samples, version), "tokens": tokens}

    def _minibatches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield the samples of each update, shuffled again in each epoch."""
        size = math.ceil(len(samples) / self.recipe.updates)
        for _ in range(self.recipe.epochs):
            order = self._random.sample(list(samples), len(samples))
            for at in range(0, len(order), size):
                yield order[at : at + size]

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps in addition to the weights."""
        return {
            "steps": self.steps,
            "optimizer": self._optimizer.state_dict(),
            "random": list(self._random.getstate()[1]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        self.steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        version, _, next_gauss = self._random.getstate()
        self._random.setstate((version, tuple(state["random"]), next_gauss))

    @torch.no_grad()
    def _proximal(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """Return the log-probabilities under the weights at the beginning of the step, by the sample's `id()`."""
        found = {}
        for part in portions(samples, self.recipe.portion):
            logprobs, _ = sampled_logprobs(self.model, part, self.recipe.temperature)
            sizes = [len(sample.behavior) for sample in part]
            found |= {id(sample): piece for sample, piece in zip(part, logprobs.split(sizes), strict=True)}
        return found

    def _update(self, samples: Sequence[Sample], proximal: dict[int, Tensor] | None) -> list[dict[str, float]]:
        """Make one step of the optimizer, with the gradient summed over portions; return the figures of each."""
        tokens = sum(len(sample.behavior) for sample in samples)
        watched = []
        for part in portions(samples, self.recipe.portion):
            log_shares, ids = distributions(self.model, part, self.recipe.temperature)
            current = log_shares.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            start = current.detach() if proximal is None else torch.cat([proximal[id(each)] for each in part])
            behavior = torch.from_numpy(np.concatenate([each.behavior for each in part]))
            advantages = torch.from_numpy(np.concatenate([each.advantages for each in part]))
            advantages = torch.where(advantages < 0, self.recipe.discouragement * advantages, advantages)
            loss = dapo_loss(current, start, behavior, advantages, tokens, self.recipe.clip)
            (loss.value + self._support_loss(log_shares, part, tokens)).backward()
            gap = (start - behavior).abs()
            watched.append(
                {
                    "tokens": float(len(current)),
                    "entropy": -(log_shares.exp() * log_shares).detach().sum(-1).mean().item(),
                    "clipped": loss.clipped,
                    "capped": loss.capped,
                    "logprob_gap": gap.mean().item(),
                    "logprob_gap_max": gap.max().item(),
                }
            )
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_norm).item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [each | {"gradient_norm": norm} for each in watched]

    def _support_loss(self, log_shares: Tensor, part: Sequence[Sample], tokens: int) -> Tensor:
        """Return the loss of the tokens that might have been sampled; 0 if the samples name none."""
        value, first = log_shares.new_zeros(()), 0
        for sample in part:
            if (support := sample.support) is not None:
                places = torch.from_numpy(support.places) + first
                current = log_shares[places, torch.from_numpy(support.token_ids)]
                start, advantages = torch.from_numpy(support.logprobs), torch.from_numpy(support.advantages)
                value = value + dapo_loss(current, start, start, advantages, tokens, self.recipe.clip).value
            first += len(sample.behavior)
        return value


def _means(updates: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Return means over the tokens; for a maximum, return the largest value."""
    parts = [part for update in updates for part in update]
    tokens = sum(part["tokens"] for part in parts)
    found = {name: sum(part[name] * part["tokens"] for part in parts) / tokens for name in parts[0]}
    largest = max(part["logprob_gap_max"] for part in parts)
    return found | {"logprob_gap_max": largest}


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Return how many versions the tokens are behind the weights in training."""
    behind = version - np.concatenate([sample.versions for sample in samples])
    return {"staleness": float(behind.mean()), "staleness_max": float(behind.max())}
