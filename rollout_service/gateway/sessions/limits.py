"""The limits of a rollout, and the answer to a program that has reached one.

Guarantee: the calls of a rollout never sample more tokens together than it may, however many are open at once, and none
is cut short for tokens that another then does not use.

The program gets a last answer like any other, with only a text: every client takes a text without tool calls for
the end of the task, and an error would make many repeat the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import FinishReason
from rollout_service.base.signals import ChangeSignal
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    ModelCall,
    TextDelta,
)
from rollout_service.gateway.sessions.answer import LiveAnswer

_TEXTS = {
    StopReason.MAX_TURNS: "The limit of turns for this task is reached.",
    StopReason.MAX_TOKENS: "The limit of tokens for this task is reached.",
}
_NOTHING = AnswerUsage(prompt_tokens=0, cached_tokens=0, sampled_tokens=0)


class TokensSpentError(Exception):
    """The calls of the rollout have used up its tokens."""


class TokenBudget:
    """The tokens that a rollout may still sample."""

    def __init__(self, most: int) -> None:
        self._left = most
        """Those that are neither sampled nor reserved."""
        self._reserved = 0
        self._settled = ChangeSignal()

    async def reserve(self, wanted: int) -> int:
        """Reserve tokens for a call: as many as it wants, or, once no other call may return some, all that are left.

        Raises:
            TokensSpentError: None are left.
        """
        while self._left < wanted and self._reserved:
            await self._settled.wait()
        if not self._left:
            raise TokensSpentError
        tokens = min(self._left, wanted)
        self._left -= tokens
        self._reserved += tokens
        return tokens

    def settle(self, reserved: int, sampled: int) -> None:
        """Return the tokens that a call has reserved and not sampled."""
        self._reserved -= reserved
        self._left += reserved - sampled
        self._settled.notify()


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
    answer.end([AnswerBegin("limit", 0), *closing_events(reason)])
    return answer


def closing_events(reason: StopReason) -> Sequence[AnswerEvent]:
    """Return the events of a limit's text, after the beginning of an answer."""
    return [TextDelta(_TEXTS[reason]), AnswerEnd(FinishReason.STOP, _NOTHING)]
