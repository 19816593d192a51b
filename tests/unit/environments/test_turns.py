"""Episodes in turns add up what the other side gives, and end when it, or a limit, says so."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import RolloutRequest, StopReason
from api_schemas.tasks import Task
from api_schemas.trajectories import Message
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.turns import Consequence, score_turns, take_turns
from rollout_service.episodes import ContextFullError, Episode, EpisodeLimits
from rollout_service.testing.scripted_policy import ScriptedPolicy, ScriptedTurn, turn

BEGIN = [Message(role="user", content="Play.")]


class Scripted:
    """Gives its replies in order, and keeps the actions."""

    def __init__(self, replies: Sequence[Consequence | EnvironmentFailedError]) -> None:
        self.actions: list[str] = []
        self._replies = iter(replies)

    async def step(self, action: str) -> Consequence:
        self.actions.append(action)
        reply = next(self._replies)
        if isinstance(reply, EnvironmentFailedError):
            raise reply
        return reply


def episode(script: Sequence[ScriptedTurn], **limits: float) -> Episode:
    task = Task(environment="game", instance={})
    return Episode(
        request=RolloutRequest(rollout_id="r", task=task),
        attempt=1,
        limits=EpisodeLimits(**limits),  # type: ignore[arg-type]
        policy=ScriptedPolicy(script),
    )


async def test_replies_are_messages_and_rewards_add_up():
    played = episode(["left", "right"])
    partner = Scripted(
        [Consequence("a wall", -0.5), Consequence("out", 2.0, done=True, parts={"length": 2.0})]
    )
    assert await take_turns(played, BEGIN, partner) is StopReason.FINISHED
    assert partner.actions == ["left", "right"]
    assert [message.content for message in played.policy.messages] == ["Play.", "left", "a wall", "right"]
    score = score_turns(played)
    assert score.reward == 1.5
    assert score.parts == {"turns": 2.0, "finished": 1.0, "turn_1": -0.5, "turn_2": 2.0, "length": 2.0}


@pytest.mark.parametrize(
    ("script", "limits", "why"),
    [
        (["a", "b"], {"max_turns": 1}, StopReason.MAX_TURNS),
        (["aaaa", "b"], {"max_tokens": 4}, StopReason.MAX_TOKENS),
        (["a", ContextFullError("full")], {}, StopReason.CONTEXT_FULL),
        (["a", turn("b", truncated=True)], {}, StopReason.TRUNCATED),
    ],
)
async def test_a_limit_keeps_what_was_earned(script, limits, why):
    played = episode(script, **limits)
    partner = Scripted([Consequence("go on", 0.25), Consequence("never reached", 100.0)])
    assert await take_turns(played, BEGIN, partner) is why
    assert score_turns(played).reward == 0.25
    assert score_turns(played).parts["finished"] == 0.0


async def test_a_failure_of_the_other_side_is_no_reward():
    with pytest.raises(EnvironmentFailedError, match="no game"):
        await take_turns(episode(["a"]), BEGIN, Scripted([EnvironmentFailedError("no game")]))


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=100))
async def test_the_reward_is_the_sum_whatever_is_shown(rewards):
    replies = [
        Consequence("", reward, done=number == len(rewards)) for number, reward in enumerate(rewards, 1)
    ]
    played = episode(["x"] * len(rewards), max_turns=len(rewards))
    await take_turns(played, BEGIN, Scripted(replies))
    score = score_turns(played)
    assert math.isclose(score.reward, sum(rewards), abs_tol=1e-9)
    assert score.parts["turns"] == len(rewards)
    assert len(score.parts) <= 66
