"""What a teacher that knows the hint thinks of a turn: the policy itself with the hint in its prompt, or the service's.

Guarantee: there is exactly one log-probability for each token that is asked about, or none at all. Nothing is filled
in: a filler of 0.0 would say that the teacher is certain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..policy import Sample, distributions, portions
from .turns import Turn

Floats = NDArray[np.float32]
CANDIDATES = 8
"""How many tokens the policy itself is asked about as a teacher, in each place: those that it likes best itself."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The log-probabilities of some tokens in each place of a turn: to the teacher, and to the policy."""

    token_ids: NDArray[np.int64]
    """`[places, tokens]`; the sampled ones alone if the teacher said nothing about others."""
    teacher: Floats
    policy: Floats
    covers: bool
    """Whether it is about what might have been sampled, too."""

    def advantages(self, cut: float) -> Floats:
        """Return how much better the teacher likes each token, cut off.

        Among tokens that might have been sampled, each counts by its share of the policy's probability: this is the
        mean of what samples would get.
        """
        better = np.clip(self.teacher - self.policy, -cut, cut)
        if not self.covers:
            return better
        shares = np.exp(self.policy)
        return better * shares / shares.sum(-1, keepdims=True)


def delivered(turn: Turn, before: Floats, dropped: Counter[str]) -> Lesson | None:
    """Return what a teacher of the service said; None, and a count, if that cannot be used.

    `before` has the policy's log-probabilities of the vocabulary in each place.
    """
    said, count = turn.mark.teacher, len(turn.token_ids)
    if said is None:
        return None
    covers = said.top_ids is not None and said.top_logprobs is not None
    ids = said.top_ids if covers else turn.token_ids[:, None].tolist()
    logprobs = said.top_logprobs if covers else [[value] for value in said.logprobs]
    widths = {len(row) for row in (*ids, *logprobs)}
    if not len(ids) == len(logprobs) == len(said.logprobs) == count or len(widths) != 1:
        dropped["teacher_length"] += 1
        return None
    if not np.isfinite(logprobs).all():
        dropped["teacher_not_finite"] += 1
        return None
    chosen = np.asarray(ids, np.int64)
    return Lesson(chosen, np.asarray(logprobs, np.float32), np.take_along_axis(before, chosen, -1), covers)


def own(before: Floats, hinted: Floats) -> Lesson:
    """Return what the policy itself says when it knows the hint, of the tokens that it likes best without it."""
    ids = np.argsort(-before, axis=-1)[:, :CANDIDATES]
    return Lesson(ids, np.take_along_axis(hinted, ids, -1), np.take_along_axis(before, ids, -1), covers=True)


def hinted_prompt(turn: Turn) -> Sample:
    """Return the prompt with the hint, followed by what was sampled without it."""
    if turn.mark.hint is None:
        raise ValueError("the turn has no hint")
    prompt, count = turn.mark.hint.prompt_ids, len(turn.token_ids)
    ids = np.concatenate([np.asarray(prompt, np.int32), turn.token_ids])
    nothing = np.zeros(count, np.float32)
    return Sample(ids, np.arange(len(ids)) >= len(prompt), nothing, np.zeros(count, np.int32), nothing)


@torch.no_grad()
def read(model: Any, samples: Mapping[int, Sample], temperature: float, portion: int) -> Iterator[tuple[int, Floats]]:
    """Yield the log-probabilities of the vocabulary at each sample's own tokens, with its key."""
    keys = {id(sample): key for key, sample in samples.items()}
    for part in portions(list(samples.values()), portion):
        log_shares, _ = distributions(model, part, temperature)
        for sample, piece in zip(part, log_shares.split([len(each.behavior) for each in part]), strict=True):
            yield keys[id(sample)], piece.numpy()
