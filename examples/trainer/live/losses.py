"""Three ways to learn from live sessions, as advantages that the trainer's usual loss takes.

- *Binary*: every token of a turn gets the turn's value, less what this user's turns are usually worth.
- *Distillation*: tokens get how much likelier they are to a teacher that knows the hint than to the policy, cut off at
  `cut`: log pi(a | prompt with hint) - log pi(a | prompt). The turn's value is not looked at. If the teacher says it of
  several tokens in each place, all of them count, sampled or not: a hint follows a bad answer, so what it asks for was
  seldom sampled.
- *Combined*: the weighted sum of both. A turn with a value and a hint is trained on once.

Guarantee: a token is trained on if, and only if, its turn has a value or a hint that these weights ask for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_client.arrays import BatchArrays

from ..policy import Sample, Support
from . import teacher
from .baseline import RunningMeans
from .teacher import Lesson
from .turns import Turn, shuffled_values, turns_of


@dataclass(frozen=True, slots=True)
class Weights:
    """What is learned from."""

    value: float = 1.0
    """The weight of values; 0 for distillation alone."""
    hint: float = 0.0
    """The weight of hints; 0 for values alone."""
    cut: float = 2.0
    """The largest difference to the teacher, in nats, either way."""
    baseline: bool = True
    """Whether values are less what a user's turns are usually worth."""
    shuffle: bool = False
    """Whether turns get each other's values: a control."""


BINARY = Weights()
DISTILLATION = Weights(value=0.0, hint=1.0)
COMBINED = Weights(value=1.0, hint=1.0)


@dataclass(slots=True)
class LiveLoss:
    """Turns batches of live sessions into samples."""

    weights: Weights = BINARY
    temperature: float = 1.0
    portion: int = 32
    """The samples in one forward pass."""
    means: RunningMeans = field(default_factory=RunningMeans)
    dropped: Counter[str] = field(default_factory=Counter)
    """Hints that could not be used, by the reason."""

    def samples(self, arrays: BatchArrays, model: Any) -> list[Sample]:
        """Return what to learn from; `model` has the trainer's present weights."""
        turns = turns_of(arrays)
        if self.weights.shuffle:
            turns = shuffled_values(turns, arrays.batch.number)
        values = self._values(turns) if self.weights.value else {}
        lessons = self._lessons(arrays, turns, model) if self.weights.hint else {}
        by_segment: dict[int, list[int]] = defaultdict(list)
        for place in sorted(values.keys() | lessons.keys()):
            by_segment[turns[place].segment].append(place)
        return [
            self._sample(arrays, [(turns[place], values.get(place, 0.0), lessons.get(place)) for place in some])
            for some in by_segment.values()
        ]

    def _values(self, turns: Sequence[Turn]) -> dict[int, float]:
        """Return the advantages of turns with a value, by their places."""
        judged = {place: turn.mark.value for place, turn in enumerate(turns) if turn.mark.value is not None}
        by_user: dict[str, list[float]] = defaultdict(list)
        for place, value in judged.items():
            by_user[turns[place].user].append(value)
        self.means.update(by_user)
        usual = self.means.of if self.weights.baseline else lambda _: 0.0
        return {place: self.weights.value * (value - usual(turns[place].user)) for place, value in judged.items()}

    def _lessons(self, arrays: BatchArrays, turns: Sequence[Turn], model: Any) -> dict[int, Lesson]:
        """Return what a teacher says of the turns with one, by their places."""
        taught = {place: turn for place, turn in enumerate(turns) if turn.mark.hint is not None or turn.mark.teacher}
        alone = {place: _only(arrays, turn) for place, turn in taught.items()}
        before = dict(teacher.read(model, alone, self.temperature, self.portion))
        by_itself = {place: teacher.hinted_prompt(turn) for place, turn in taught.items() if turn.mark.teacher is None}
        hinted = dict(teacher.read(model, by_itself, self.temperature, self.portion))
        found = {
            place: teacher.own(before[place], hinted[place])
            if place in hinted
            else teacher.delivered(turn, before[place], self.dropped)
            for place, turn in taught.items()
        }
        return {place: lesson for place, lesson in found.items() if lesson is not None}

    def _sample(self, arrays: BatchArrays, turns: Sequence[tuple[Turn, float, Lesson | None]]) -> Sample:
        """Return a segment with the advantages of these turns of it, in their order."""
        columns = arrays.segment(turns[0][0].segment)
        places = np.concatenate([turn.tokens for turn, _, _ in turns])
        advantages, support, first = [], [], 0
        for turn, value, lesson in turns:
            shares = np.full(len(turn.tokens), value, np.float32)
            if lesson is not None and lesson.covers:
                support.append(_support(lesson, first, self.weights))
            elif lesson is not None:
                shares += self.weights.hint * lesson.advantages(self.weights.cut)[:, 0]
            advantages.append(shares)
            first += len(turn.tokens)
        return Sample(
            columns["token_ids"],
            np.isin(np.arange(len(columns["token_ids"])), places),
            columns["logprobs"][places],
            columns["versions"][places],
            np.concatenate(advantages),
            _joined(support),
        )


def _only(arrays: BatchArrays, turn: Turn) -> Sample:
    """Return the segment up to the end of this turn, whose tokens alone are read."""
    ids = arrays.segment(turn.segment)["token_ids"][: turn.tokens[-1] + 1]
    nothing = np.zeros(len(turn.tokens), np.float32)
    mask = np.isin(np.arange(len(ids)), turn.tokens)
    return Sample(ids, mask, nothing, np.zeros(len(turn.tokens), np.int32), nothing)


def _support(lesson: Lesson, first: int, weights: Weights) -> Support:
    """Return what a lesson says of the tokens from `first` on of a sample."""
    places = np.arange(first, first + len(lesson.token_ids))
    advantages = np.float32(weights.hint) * lesson.advantages(weights.cut)
    return Support(
        np.repeat(places, lesson.token_ids.shape[1]),
        lesson.token_ids.ravel(),
        lesson.policy.ravel(),
        advantages.ravel(),
    )


def _joined(parts: Sequence[Support]) -> Support | None:
    if not parts:
        return None
    names = ("places", "token_ids", "logprobs", "advantages")
    return Support(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
