"""An engine's answer as a turn: checked before it is recorded, and read as a message."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from api_schemas.trajectories import Message
from rollout_service.tokens.errors import RecordError
from rollout_service.tokens.renderer import ParsedTurn

_LARGEST_ID, _LARGEST_VERSION = 2**31 - 1, 2**63 - 1
"""The largest values that segments have room for."""


def as_message(parsed: ParsedTurn) -> Message:
    """Return the assistant's message that a turn was parsed into."""
    return Message.model_construct(
        role="assistant",
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=list(parsed.tool_calls),
        tool_call_id=None,
        name=None,
    )


def check_output(ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
    """Check that an engine's answer can be trained on.

    Raises:
        RecordError: The lists differ in length, or hold numbers that a segment cannot.
    """
    if not len(ids) == len(logprobs) == len(versions):
        raise RecordError(
            f"{len(ids)} sampled ids came with {len(logprobs)} log-probabilities and {len(versions)} versions",
            hint="Ask the engine for the log-probability of every sampled token.",
        )
    if min(ids, default=0) < 0 or min(versions, default=0) < 0:
        raise RecordError("a sampled id or a version is negative", hint="Check the engine's answer.")
    if max(ids, default=0) > _LARGEST_ID or max(versions, default=0) > _LARGEST_VERSION:
        raise RecordError("a sampled id or a version is too large", hint="Check the engine's answer.")
    if not all(map(isfinite, logprobs)):
        raise RecordError(
            "a log-probability is not a finite number", hint="Look for NaN in the engine's weights."
        )
