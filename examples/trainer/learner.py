"""One step of the trainer: samples in, changed weights out.

Guarantee: a step is a function of the samples, the weights, the optimiser's state and the seed; what `state` returns is
all that has to be kept for the next process to go on as this one would have.
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
from .policy import Sample, load_policy, portions, sampled_logprobs


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a researcher changes first."""

    learning_rate: float = 3e-4
    warm_up: int = 2
    """Steps."""
    horizon: int = 24
    """Steps over which the learning rate then falls to `last` of itself, where it stays."""
    last: float = 0.1
    epochs: int = 1
    """How often a batch is gone through."""
    updates: int = 4
    """Optimiser steps of an epoch. With more than one step of a batch, the clip has something to do."""
    portion: int = 32
    """Samples in one forward pass: memory, and nothing else, depends on it."""
    discouragement: float = 0.3
    """What negative advantages are multiplied by. 1 is DAPO; less allows for larger steps, since samples that are made
    unlikely without end are what makes these diverge."""
    max_norm: float = 1.0
    temperature: float = 1.0
    clip: Clip = field(default_factory=Clip)

    def learning_rate_of(self, step: int) -> float:
        """That of a step, the first being 1: it rises, then falls in a straight line."""
        left = 1.0 - min(1.0, step / self.horizon)
        return self.learning_rate * min(step / self.warm_up, self.last + (1.0 - self.last) * left, 1.0)


class Learner:
    """The policy with its optimiser."""

    def __init__(self, folder: Path, recipe: Recipe, *, seed: int = 0) -> None:
        """Begin with the checkpoint in `folder`."""
        self.model = load_policy(folder)
        self.recipe = recipe
        self.steps = 0
        """Steps made; also the version of the weights."""
        self._random = random.Random(seed)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Change the weights; says what there is to watch. Without samples the version rises all the same."""
        version, self.steps = self.steps, self.steps + 1
        if not samples:
            return {"tokens": 0.0}
        self.model.train()
        several = self.recipe.updates * self.recipe.epochs > 1
        proximal = self._proximal(samples) if several else None
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_of(self.steps)
        watched = [self._update(part, proximal) for part in self._minibatches(samples)]
        tokens = float(sum(len(sample.behaviour) for sample in samples))
        return {**_means(watched), **_staleness(samples, version), "tokens": tokens}

    def _minibatches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """The samples of each update, drawn anew in each epoch."""
        size = math.ceil(len(samples) / self.recipe.updates)
        for _ in range(self.recipe.epochs):
            order = self._random.sample(list(samples), len(samples))
            for at in range(0, len(order), size):
                yield order[at : at + size]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        return {
            "steps": self.steps,
            "optimizer": self._optimizer.state_dict(),
            "random": list(self._random.getstate()[1]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self.steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        version, _, next_gauss = self._random.getstate()
        self._random.setstate((version, tuple(state["random"]), next_gauss))

    @torch.no_grad()
    def _proximal(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """Log-probabilities under the weights that the step begins with, by the sample."""
        found = {}
        for part in portions(samples, self.recipe.portion):
            logprobs, _ = sampled_logprobs(self.model, part, self.recipe.temperature)
            sizes = [len(sample.behaviour) for sample in part]
            found |= {id(sample): piece for sample, piece in zip(part, logprobs.split(sizes), strict=True)}
        return found

    def _update(
        self, samples: Sequence[Sample], proximal: dict[int, Tensor] | None
    ) -> list[dict[str, float]]:
        """One step of the optimiser, its gradient summed over portions."""
        tokens = sum(len(sample.behaviour) for sample in samples)
        watched = []
        for part in portions(samples, self.recipe.portion):
            current, entropies = sampled_logprobs(self.model, part, self.recipe.temperature)
            start = current.detach() if proximal is None else torch.cat([proximal[id(each)] for each in part])
            behaviour = torch.from_numpy(np.concatenate([each.behaviour for each in part]))
            advantages = torch.cat([torch.full((len(each.behaviour),), each.advantage) for each in part])
            advantages = torch.where(advantages < 0, self.recipe.discouragement * advantages, advantages)
            loss = dapo_loss(current, start, behaviour, advantages, tokens, self.recipe.clip)
            loss.value.backward()
            gap = (start - behaviour).abs()
            watched.append(
                {
                    "tokens": float(len(current)),
                    "entropy": entropies.mean().item(),
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


def _means(updates: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Means over tokens, and the largest of what is a maximum."""
    parts = [part for update in updates for part in update]
    tokens = sum(part["tokens"] for part in parts)
    found = {name: sum(part[name] * part["tokens"] for part in parts) / tokens for name in parts[0]}
    largest = max(part["logprob_gap_max"] for part in parts)
    return found | {"logprob_gap_max": largest}


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How many versions the tokens lie behind the weights that are trained."""
    behind = version - np.concatenate([sample.versions for sample in samples])
    return {"staleness": float(behind.mean()), "staleness_max": float(behind.max())}
