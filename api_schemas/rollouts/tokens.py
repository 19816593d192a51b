"""A trajectory for looking at: the text and the numbers of a range of tokens, as columns.

Runs of equal values are sent once, as pairs of a value and a count. A byte-level vocabulary cuts characters, so the
text of a range is made from the bytes of all its tokens, and `ends` says where each token ends in it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import WithJsonSchema

from api_schemas.base import RolloutId, WireModel
from api_schemas.rollouts.sessions import MaskReason
from api_schemas.trajectories import FinishReason, ForkReason, Message, SegmentRole

# Generators of clients and of requests know lists better than tuples, which JSON Schema writes as `prefixItems`.
_PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
RunLengths = list[Annotated[tuple[int, int], WithJsonSchema(_PAIR)]]
"""Pairs of a value and how often it follows itself."""


class TurnRange(WireModel):
    """The sampled tokens of one turn in a segment."""

    turn: int
    start: int
    """The index of its first token in the segment."""
    end: int
    version: int
    """The version that sampled its first token."""
    masked_because: MaskReason | None = None
    """Why a turn of a live session is not trained on."""


class SegmentOutline(WireModel):
    """A segment without its tokens."""

    index: int
    """Its number, as in `Segment.parent`: those of `untrained` come after the others."""
    trained: bool
    """Whether it is one of `segments`, not of `untrained`."""
    tokens: int
    sampled: int
    """The tokens with mask 1."""
    fork_reason: ForkReason
    parent: int | None = None
    shared_prefix: int = 0
    role: SegmentRole = SegmentRole.MAIN
    turns: list[TurnRange] = []
    first_difference: int | None = None
    """The index of the first token that differs from the parent's; null without a parent."""


class TrajectoryOutline(WireModel):
    """The segments of a trajectory, without their tokens."""

    rollout_id: RolloutId
    node: int | None = None
    """The number of the sub-agent whose trajectory it is; null for the agent's own."""
    segments: list[SegmentOutline]
    has_text: bool
    """Whether the tokens can be decoded: the tokenizer of the rollout's pool is known here."""
    has_entropy: bool = False
    """Whether the likeliest tokens were exported, so that entropy can be estimated."""


class TokenRange(WireModel):
    """A range of a segment's tokens, as columns with one entry for each token, unless they say otherwise."""

    segment: int
    start: int
    """The index of the first token in the segment."""
    count: int
    total: int
    """The number of tokens in the segment."""
    ids: list[int]
    text: str | None = None
    """The text of the range; null if the tokenizer is not known. Bytes that are no text are U+FFFD."""
    ends: list[int] = []
    """Where each token ends in `text`, in UTF-16 code units, as JavaScript counts them. A token that is a part of a
    character ends where the character begins, except for the last part."""
    partial: list[int] = []
    """The positions in the range of tokens that are parts of characters."""
    pieces: dict[int, str] = {}
    """The bytes of each of those tokens, in hexadecimal."""
    mask: RunLengths
    """Runs of (mask, count)."""
    versions: RunLengths
    """Runs of (version, count)."""
    turns: RunLengths
    """Runs of (turn id, count)."""
    logprobs: list[float | None]
    """Rounded to 4 digits; null where the mask is 0."""
    entropy: list[float | None] | None = None
    """In nats, of the exported likeliest tokens with the rest as one more outcome, which is a lower bound. Null if they
    were not exported."""


class RolloutMessages(WireModel):
    """The conversation of a trajectory at its end, without its tokens."""

    rollout_id: RolloutId
    node: int | None = None
    """The number of the sub-agent whose conversation it is; null for the agent's own."""
    messages: list[Message]
    finish_reasons: list[FinishReason]
    """Why each turn ended, by turn id."""
