"""Trajectories: token-exact records of what a policy saw and sampled, ready to train on.

A trajectory is a list of segments. Inside a segment every prompt extends the previous prompt and its output
token by token, so a segment is one training sample: five lists of equal length. Token ids, log-probabilities
and versions come from the engine and are never derived from text.
"""

from __future__ import annotations

from typing import Any, Literal

from api_schemas.base import Integer, Real, StrEnum, WireModel


class ForkReason(StrEnum):
    """Why a segment was begun."""

    FIRST = "first"
    """It is the first one."""
    BRIDGE_REFUSED = "bridge_refused"
    """The next prompt could not be proven to extend the last prompt and its output."""
    HISTORY_EDITED = "history_edited"
    """Earlier messages were changed or removed."""
    COMPACTION = "compaction"
    """Earlier messages were replaced by a summary."""


class FinishReason(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """The policy ended it."""
    LENGTH = "length"
    """A token limit cut it off."""
    ABORT = "abort"
    """The engine ended it, and it was not resumed."""


class ToolCall(WireModel):
    """A tool call as the policy wrote it, well-formed or not."""

    id: str
    """Unique in its turn; the tool's answer refers to it. The policy's own in formats that have such ids."""
    name: str | None
    arguments: dict[str, Any] | None
    """None if and only if the call is malformed."""
    raw: str
    """The call's text as it was sampled."""
    error: str | None = None
    """Why the call is malformed, as in `invalid_json`; None when it is well-formed."""


class Message(WireModel):
    """A message of a conversation. An assistant's text is derived from its token ids, for reading only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """A developer's message is a system message in formats that know no developers."""
    content: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    name: str | None = None
    """The name of the tool that answers."""


class RoutedExperts(WireModel):
    """Which experts of a mixture of experts read each token: an integer array, row by row.

    Row i is of the segment's token i. The last token of the last turn was never read, so it has no row.
    """

    shape: list[Integer]
    """`[tokens - 1, layers, experts per token]`."""
    dtype: Literal["uint8", "uint16", "int32"]
    """Little-endian; the narrowest that holds every expert's number."""
    data: str
    """The array's bytes in base64."""


class Segment(WireModel):
    """One training sample: lists of equal length, one entry a token."""

    token_ids: list[Integer]
    loss_mask: list[Integer]
    """1 exactly where the policy sampled the token in this segment, else 0."""
    logprobs: list[Real]
    """The engine's natural log-probability of the token; 0.0 where the mask is 0."""
    versions: list[Integer]
    """The version of the weights that sampled the token; -1 where the mask is 0."""
    turn_ids: list[Integer]
    """The turn of the trajectory, counted from 0; -1 where the mask is 0."""
    fork_reason: ForkReason
    parent: Integer | None = None
    """The segment that this one goes on from, counted from 0; None for the first."""
    shared_prefix: Integer = 0
    """How many ids at its beginning are those of its parent. What the parent sampled there is trained on in the
    parent alone."""

    top_ids: list[list[Integer]] | None = None
    """For each token the likeliest ids where it was sampled, best first; empty where the mask is 0. None unless
    `exports.top_logprobs` asked for it, as for the next field."""
    top_logprobs: list[list[Real]] | None = None
    """The log-probabilities of `top_ids`, of the distribution that `logprobs` is of."""
    prompt_logprobs: list[Real | None] | None = None
    """The log-probability at temperature 1 of each token that was read and not sampled, given all before it, by the
    weights of the turn's first token; None at the first token and where the mask is 1. None unless asked for."""
    routed_experts: RoutedExperts | None = None
    """None unless asked for."""


class Trajectory(WireModel):
    """All that a policy sampled in one rollout, each token in one segment."""

    segments: list[Segment]
    messages: list[Message]
    """The conversation as it stands at the end, for reading."""
    finish_reasons: list[FinishReason]
    """Why each turn ended, by turn id."""
    fork_counts: dict[ForkReason, Integer]
    """How many segments were begun for which reason."""
    kept_kv_versions: list[Integer] = []
    """Versions that were loaded in place while a turn of this rollout was in flight: what they sampled in it attends to
    KV that older weights had computed. All other tokens were sampled on KV of their own version alone."""
