"""One turn of an agent that is driven here, within the limits of its episode."""

from __future__ import annotations

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.episodes import ContextFullError, Episode, PolicyTurn


async def sample_turn(episode: Episode, messages: list[Message]) -> PolicyTurn | StopReason:
    """Sample a turn after these messages and put its text in `episode.answer`, or return why there can be none.

    Errors of the engine and the renderer are raised as they are.
    """
    limits, policy = episode.limits, episode.policy
    tokens_left = limits.max_tokens - policy.usage.sampled_tokens
    if tokens_left < 1:
        return StopReason.MAX_TOKENS
    try:
        turn = await policy.respond(messages, max_tokens=min(limits.max_turn_tokens, tokens_left))
    except ContextFullError:
        return StopReason.CONTEXT_FULL
    episode.answer = turn.message.content or None
    return turn


def why_truncated(turn: PolicyTurn, episode: Episode) -> StopReason:
    """Return which limit cut a turn off."""
    if turn.context_full:
        return StopReason.CONTEXT_FULL
    if episode.policy.usage.sampled_tokens >= episode.limits.max_tokens:
        return StopReason.MAX_TOKENS
    return StopReason.TRUNCATED


# Errors of the tools that agents call.


class ToolInputError(Exception):
    """A tool call that cannot be carried out as the policy wrote it; the policy reads the message."""
