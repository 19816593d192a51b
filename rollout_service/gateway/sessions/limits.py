"""How a program is told that it has used up its turns or tokens: by a last answer like any other, with only a text.

Every client takes a text without tool calls for the end of the task; an error would make many repeat the request.
"""

from __future__ import annotations

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import FinishReason
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.contract import AnswerBegin, AnswerEnd, AnswerUsage, ModelCall, TextDelta
from rollout_service.gateway.sessions.answer import LiveAnswer

_TEXTS = {
    StopReason.MAX_TURNS: "The limit of turns for this task is reached.",
    StopReason.MAX_TOKENS: "The limit of tokens for this task is reached.",
}
_NOTHING = AnswerUsage(prompt_tokens=0, cached_tokens=0, sampled_tokens=0)


def reached_limit(limits: EpisodeLimits, usage: Usage, open_calls: int) -> StopReason | None:
    """Return the limit that leaves no room for another call beside those that are being answered."""
    if usage.turns + open_calls >= limits.max_turns:
        return StopReason.MAX_TURNS
    if usage.sampled_tokens >= limits.max_tokens:
        return StopReason.MAX_TOKENS
    return None


def closing_answer(call: ModelCall, reason: StopReason) -> LiveAnswer:
    """Return an answer that was not sampled, and is not recorded."""
    answer = LiveAnswer(call, retry_seconds=0.0)
    answer.end([AnswerBegin("limit", 0), TextDelta(_TEXTS[reason]), AnswerEnd(FinishReason.STOP, _NOTHING)])
    return answer
