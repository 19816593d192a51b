"""With the real library, games give their own rewards, and a seed gives the same game."""

from typing import Any

import anyio
import pytest
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.environments.bridges.textarena.environment import TEXTARENA
from rollout_service.environments.bridges.textarena.environment import environment as textarena_games
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import Trial, play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from tests.support.games import in_the_library

pytestmark = [pytest.mark.apptainer, pytest.mark.bridges]
ALONE = """
import json, random, sys
import textarena
request = json.loads(sys.stdin.read())
random.seed(request["seed"])
env = textarena.make(request["game"], **request["options"])
env.reset(num_players=1, seed=request["seed"])
first = env.get_observation()[1]
for action in request["actions"]:
    if env.step(action)[0]:
        break
    env.get_observation()
print("\\nREPLY", json.dumps({"reward": env.close()[0][0], "first": first}))
"""
GUESSES = [f"I say [{number}]." for number in range(1, 21)]
PLAYS: dict[str, tuple[dict[str, JsonValue], list[str]]] = {
    "guess": ({"game": "GuessTheNumber-v0", "seed": 5, "options": {"max_number": 8}}, GUESSES),
    "guess badly": ({"game": "GuessTheNumber-v0", "seed": 6}, ["[999]", "no number", "[1]", "[1]", "[1]"]),
    "hanoi": (
        {"game": "TowerOfHanoi-v0", "seed": 1},
        [f"[{move}]" for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")],
    ),
    "blackjack": ({"game": "Blackjack-v0", "seed": 3}, ["[Stand]"] * 40),
}
"""Instances, and what a player says in each."""


async def played(instance: dict[str, JsonValue], says: list[str], sandboxes: SandboxSource) -> Trial:
    return await play(textarena_games, instance, ScriptedPolicy(says), sandboxes)


def alone(instance: dict[str, JsonValue], actions: list[str]) -> dict[str, Any]:
    """Return what the library gives the same player."""
    return in_the_library(TEXTARENA, ALONE, {"options": {}, **instance, "actions": actions})


@pytest.mark.parametrize("name", PLAYS)
async def test_the_reward_is_the_librarys_own(name, sandboxes):
    instance, says = PLAYS[name]
    trial = await played(instance, says, sandboxes)
    expected = alone(instance, says)
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == pytest.approx(expected["reward"])
    assert trial.score.parts["finished"] == 1.0
    first = trial.episode.policy.messages[1].content
    assert first
    assert first.split() == expected["first"].replace("[GAME]", "").split()


async def test_games_at_once_are_those_of_each_alone(sandboxes):
    """Games draw from a generator that a process has once, so games in one process would change each other."""
    said: dict[str, list[list[str]]] = {"guess": [], "blackjack": []}

    async def play_one(name: str) -> None:
        trial = await played(*PLAYS[name], sandboxes)
        said[name].append([message.content for message in trial.episode.policy.messages])

    for name in said:
        await play_one(name)
    async with anyio.create_task_group() as group:
        for name in (*said, *said):
            group.start_soon(play_one, name)
    for first, *others in said.values():
        assert len(set(first)) > 3
        assert others == [first, first]


async def test_a_player_sees_what_happened_and_not_its_own_words(sandboxes):
    instance: dict[str, JsonValue] = {"game": "GuessTheNumber-v0", "seed": 5, "options": {"max_number": 8}}
    trial = await played(instance, GUESSES, sandboxes)
    replies = [message.content for message in trial.episode.policy.messages[3::2]]
    assert replies
    assert set(replies) == {"The target number is higher."}
