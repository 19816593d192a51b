"""Episodes in turns: the policy says something, and a game, a simulator or a tutor answers, until one of them ends it.

Guarantees: rewards are those that the other side reported, added up, even if a limit stops the agent; a failure of the
other side fails the rollout, and is never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pydantic import BaseModel, ConfigDict

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.tools import sample_turn, why_truncated
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.episodes import Episode, Score

REWARDS: Final = "turn_rewards"
MAX_PARTS: Final = 64
"""Turns that are shown with a reward of their own."""


class Consequence(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    text: str
    reward: float = 0.0
    done: bool = False
    parts: dict[str, float] = {}
    """Shown to people with the reward."""


class Partner(Protocol):
    async def step(self, action: str) -> Consequence:
        """Play the policy's whole text.

        Raises:
            EnvironmentFailedError: The other side failed, and not because of the action.
        """
        ...


@dataclass(slots=True)
class Earned:
    rewards: list[float] = field(default_factory=list)
    finished: bool = False
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, result: Consequence) -> None:
        self.rewards.append(result.reward)
        self.finished = result.done
        self.parts.update(result.parts)


async def take_turns(episode: Episode, messages: Sequence[Message], partner: Partner) -> StopReason:
    """Let the policy act until the episode ends or a limit is reached; `messages` begin the conversation."""
    earned = episode.state[REWARDS] = Earned()
    with episode.clock.limit(episode.limits.agent_seconds):
        return await _take_turns(episode, list(messages), partner, earned)
    return StopReason.AGENT_TIMEOUT


async def _take_turns(episode: Episode, messages: list[Message], partner: Partner, earned: Earned) -> StopReason:
    for _ in range(episode.limits.max_turns):
        turn = await sample_turn(episode, messages)
        if isinstance(turn, StopReason):
            return turn
        if turn.truncated:
            return why_truncated(turn, episode)
        result = await partner.step(turn.message.content)
        earned.add(result)
        if result.done:
            return StopReason.FINISHED
        messages = [Message(role="user", content=result.text)]
    return StopReason.MAX_TURNS


async def take_actions(episode: Episode, actions: Sequence[str], partner: Partner) -> StopReason:
    """Play known actions, such as a solution's, in place of the policy.

    Raises:
        EnvironmentFailedError: They did not end the episode.
    """
    earned = episode.state[REWARDS] = Earned()
    for action in actions:
        earned.add(await partner.step(action))
        if earned.finished:
            return StopReason.FINISHED
    raise EnvironmentFailedError(
        f"the solution's actions, {len(actions)} in all, did not end the game",
        hint="Print all actions of a solution, one a line.",
    )


def score_turns(episode: Episode) -> Score:
    earned: Earned = episode.state.get(REWARDS) or Earned()
    turns = {
        f"turn_{number}": reward
        for number, reward in enumerate(earned.rewards[:MAX_PARTS], 1)
        if reward and len(earned.rewards) > 1
    }
    return Score(
        sum(earned.rewards),
        {"turns": float(len(earned.rewards)), "finished": float(earned.finished), **turns, **earned.parts},
    )
