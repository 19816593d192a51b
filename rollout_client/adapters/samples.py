"""Trajectories as rows of a trainer's batch.

A segment becomes one row, split before the first token that the policy sampled in it. Nothing is padded or made up.
Each sampled token has mask 1 in exactly one row of its rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from api_schemas.rollouts import Rollout, StopReason
from api_schemas.trajectories import Message, Segment

CUT_OFF = {StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.TRUNCATED}
"""Reasons to stop by which a token limit ended a rollout."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: a prompt, and a response in which tools' results have mask 0."""

    rollout_id: str
    segment: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 where the policy sampled the token."""
    logprobs: list[float]
    """As the engine gave them; 0.0 where the mask is 0."""
    versions: list[int]
    """The version that sampled each token; -1 where the mask is 0."""
    turn_ids: list[int]
    """The turn of each token of the response; -1 where the mask is 0."""
    reward: float | None
    """None if the rollout has none: the row must not be trained on."""
    last: bool
    """Whether it is the rollout's last row, which has the reward if a trainer takes one per rollout."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def sampled(self) -> int:
        """The number of tokens to train on."""
        return sum(self.response_mask)

    def cut(self, length: int) -> Sample:
        """Return the row with at most `length` tokens of its response, for trainers with a limit."""
        if len(self.response_ids) <= length:
            return self
        return replace(
            self,
            response_ids=self.response_ids[:length],
            response_mask=self.response_mask[:length],
            logprobs=self.logprobs[:length],
            versions=self.versions[:length],
            turn_ids=self.turn_ids[:length],
        )

    def with_prompt(self, length: int) -> Sample:
        """Return the row with a prompt of at most `length` tokens; the rest begins the response, with mask 0."""
        moved = self.prompt_ids[length:]
        return replace(
            self,
            prompt_ids=self.prompt_ids[:length],
            response_ids=moved + self.response_ids,
            response_mask=[0] * len(moved) + self.response_mask,
            logprobs=[0.0] * len(moved) + self.logprobs,
            versions=[-1] * len(moved) + self.versions,
            turn_ids=[-1] * len(moved) + self.turn_ids,
        )


class RowTooLongError(ValueError):
    """No row of a rollout has room for a token to train on."""

    @classmethod
    def of(cls, samples: Sequence[Sample], limit: str) -> RowTooLongError:
        shortest = min(len(sample.prompt_ids) for sample in samples)
        return cls(
            f"rollout {samples[0].rollout_id} has prompts of {shortest} tokens and more, which leave no room for a "
            f"token to train on: raise {limit}"
        )


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of a row: the prompt that the engine read, and what the policy sampled after it."""

    number: int
    """The turn's number in its trajectory."""
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    versions: list[int]


def turns_of(sample: Sample) -> list[SampledTurn]:
    """Return the turns of a row; each of its sampled tokens is in exactly one."""
    turns = []
    start = 0
    for number, run in groupby(sample.turn_ids):
        end = start + len(list(run))
        if number >= 0:
            turns.append(
                SampledTurn(
                    number=number,
                    prompt_ids=sample.prompt_ids + sample.response_ids[:start],
                    sampled_ids=sample.response_ids[start:end],
                    logprobs=sample.logprobs[start:end],
                    versions=sample.versions[start:end],
                )
            )
        start = end
    return turns


def samples_of(rollout: Rollout) -> list[Sample]:
    """Return the rows of a rollout, in order; none if nothing was sampled."""
    segments = rollout.trajectory.segments if rollout.trajectory is not None else []
    numbers = [number for number, segment in enumerate(segments) if any(segment.loss_mask)]
    return [_sample(rollout, segments[number], number, last=number == numbers[-1]) for number in numbers]


def only_largest(samples: list[Sample]) -> list[Sample]:
    """Return the row with the most tokens to train on, for trainers that take one; none if there are no rows."""
    return [max(samples, key=lambda sample: sample.sampled)] if samples else []


def count_left_out(samples: Sequence[Sample], rows: Sequence[Sample]) -> int:
    """Count the tokens to train on that a trainer does not get with these `rows`."""
    return sum(sample.sampled for sample in samples) - sum(row.sampled for row in rows)


def conversation_of(rollout: Rollout) -> tuple[list[Message], list[int]]:
    """Return the messages, and the places of the turns among them; no places if a compaction has removed turns."""
    if rollout.trajectory is None:
        return [], []
    messages = rollout.trajectory.messages
    own = [place for place, message in enumerate(messages) if message.role == "assistant"]
    return messages, own if len(own) == len(rollout.trajectory.finish_reasons) else []


def last_said(rollout: Rollout) -> str:
    """Return the policy's last message, for a trainer's log; training uses the ids."""
    messages = rollout.trajectory.messages if rollout.trajectory is not None else []
    return next((one.content for one in reversed(messages) if one.role == "assistant"), "")


def _sample(rollout: Rollout, segment: Segment, number: int, *, last: bool) -> Sample:
    start = segment.loss_mask.index(1)
    return Sample(
        rollout_id=rollout.rollout_id,
        segment=number,
        prompt_ids=segment.token_ids[:start],
        response_ids=segment.token_ids[start:],
        response_mask=segment.loss_mask[start:],
        logprobs=segment.logprobs[start:],
        versions=segment.versions[start:],
        turn_ids=segment.turn_ids[start:],
        reward=rollout.reward,
        last=last,
    )
