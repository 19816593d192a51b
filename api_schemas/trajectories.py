"""Trajectories: token-exact records of a policy's prompts and completions, ready to train on.

A trajectory is a list of segments. In a segment, every prompt extends the previous prompt and its output token by
token, so a segment is one training sample: five lists of equal length. Token ids, log-probabilities and versions
come from the engine and are never derived from text. What was sampled but is not to be trained on, such as the title
that a client asked for, is in segments of a list of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from api_schemas.base import Integer, Real, StrEnum, Text, WireModel


class ForkReason(StrEnum):
    """Why a segment began."""

    FIRST = "first"
    """It is the first segment."""
    BRIDGE_REFUSED = "bridge_refused"
    """The next prompt could not be proven to extend the last prompt and its output."""
    HISTORY_EDITED = "history_edited"
    """Earlier messages were changed or removed."""
    COMPACTION = "compaction"
    """Earlier messages were replaced by a summary."""
    BRANCH = "branch"
    """It continues a turn that another segment continues too, or answers a prompt a second time."""
    NEW_ROOT = "new_root"
    """It shares no turn with any conversation before it."""
    ANSWER_MISSING = "answer_missing"
    """The client left out the answer to the last prompt."""
    ANSWER_CHANGED = "answer_changed"
    """The client changed the text of an answer."""
    FOREIGN_ASSISTANT = "foreign_assistant"
    """A message of the assistant was not sampled from the policy."""
    TOOLS_CHANGED = "tools_changed"
    """The conversation goes on with other tools."""
    SYSTEM_CHANGED = "system_changed"
    """The conversation goes on with another system prompt."""


class SegmentRole(StrEnum):
    """Whose conversation a segment is."""

    MAIN = "main"
    """The agent's own."""
    SUBAGENT = "subagent"
    """That of an agent which the agent started."""
    SIDE = "side"
    """A call beside the conversation, such as one for its title."""


class FinishReason(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """The policy ended it."""
    LENGTH = "length"
    """A token limit cut it off."""
    ABORT = "abort"
    """The engine ended it, and it was not continued."""


class ToolCall(WireModel):
    """A tool call as the policy wrote it, well-formed or not."""

    id: str
    """The call's id, to which the tool's answer refers; unique in its turn. It is the policy's own in formats that have
    such ids."""
    name: str | None
    arguments: dict[str, Any] | None
    """The arguments; null if and only if the call is malformed."""
    raw: str
    """The call's text as it was sampled."""
    error: str | None = None
    """Why the call is malformed, such as `invalid_json`; null if it is well-formed."""


class Message(WireModel):
    """A message of a conversation. An assistant's text is derived from its token ids, for reading only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """The author of the message. `developer` becomes `system` in formats without that role."""
    content: Text = ""
    reasoning: Text | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """The id of the call that a tool's message answers."""
    name: str | None = None
    """The name of the tool, in a tool's message."""


class RoutedExperts(WireModel):
    """The experts of a mixture of experts that read each token, as an integer array in row-major order.

    Row i belongs to token i of the segment. The last token of the last turn was never read, so it has no row.
    """

    shape: list[Integer]
    """The shape of the array: `[tokens - 1, layers, experts per token]`."""
    dtype: Literal["uint8", "uint16", "int32"]
    """The type of the array: the narrowest that holds every expert's number. It is little-endian."""
    data: str
    """The bytes of the array in base64."""


class Segment(WireModel):
    """One training sample: lists of equal length, with one entry per token."""

    token_ids: list[Integer]
    loss_mask: list[Integer]
    """1 for each token that the policy sampled in this segment, 0 for all others."""
    logprobs: list[Real]
    """The engine's natural log-probability of each token; 0.0 where the mask is 0."""
    versions: list[Integer]
    """The version of the weights that sampled each token; -1 where the mask is 0."""
    turn_ids: list[Integer]
    """The turn that sampled each token, counted from 0 in the trajectory; -1 where the mask is 0."""
    fork_reason: ForkReason
    """Why this segment began."""
    parent: Integer | None = None
    """The segment that this one continues; null if it continues none. Segments are counted from 0, and those of
    `untrained` after the others. A segment to train on has only such a segment as its parent."""
    shared_prefix: Integer = 0
    """The number of leading ids that this segment shares with its parent. Tokens that the parent sampled there have
    mask 1 only in the parent."""
    role: Annotated[SegmentRole, Field(exclude_if=lambda role: role is SegmentRole.MAIN)] = SegmentRole.MAIN
    """Whose conversation it is. Left out of JSON if it is the agent's own."""

    top_ids: list[list[Integer]] | None = None
    """The likeliest ids at each sampled token, best first; empty where the mask is 0. Null unless requested by
    `exports.top_logprobs`."""
    top_logprobs: list[list[Real]] | None = None
    """The log-probabilities of `top_ids`, in the same distribution as `logprobs`. Null unless requested by
    `exports.top_logprobs`."""
    prompt_logprobs: list[Real | None] | None = None
    """The log-probability at temperature 1 of each token that was read and not sampled, given all tokens before it,
    under the weights of the turn's first sampled token. An entry is null for the first token and where the mask is 1.
    Null unless requested by `exports.prompt_logprobs`."""
    routed_experts: RoutedExperts | None = None
    """The experts that read each token. Null unless requested by `exports.routed_experts`."""


class Trajectory(WireModel):
    """Everything that a policy sampled in one rollout, each token in one segment."""

    segments: list[Segment]
    """Everything that may be trained on."""
    messages: list[Message]
    """The conversation at its end, for reading."""
    finish_reasons: list[FinishReason]
    """Why each turn ended, by turn id."""
    fork_counts: dict[ForkReason, Integer]
    """The number of segments that began for each reason, those of `untrained` included."""
    kept_kv_versions: list[Integer] = []
    """The versions that were loaded in place while a turn of this rollout was in flight. Their tokens in that turn
    attend to KV that older weights computed; all other tokens were sampled on KV of their own version only."""
    tool_error_turns: Annotated[list[Integer], Field(exclude_if=lambda turns: not turns)] = []
    """The turns of the built-in agent with a tool call that failed: it was malformed or refused, reached a limit, or
    ended in an error. Left out of JSON if there are none."""
    proposed_turns: Annotated[list[Integer], Field(exclude_if=lambda turns: not turns)] = []
    """The turns at which the environment proposed to begin branches. Left out of JSON if there are none."""
    untrained: Annotated[list[Segment], Field(exclude_if=lambda segments: not segments)] = []
    """Segments that are not to be trained on, masked as in `segments`: side calls, answers that their client did not
    receive, and a client's sub-agents unless the run trains them. Left out of JSON if there are none."""
