"""With the real libraries, a game through a bridge gives the rewards of the library's own loop on the same actions."""

from typing import Any

import pytest
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.games.environment import GameEnvironment
from rollout_service.environments.bridges.games.library import GameLibrary
from rollout_service.environments.bridges.gem.environment import GEM
from rollout_service.environments.bridges.gem.environment import environment as gem_games
from rollout_service.environments.bridges.gymnasium.environment import GYMNASIUM
from rollout_service.environments.bridges.gymnasium.environment import environment as gymnasium_games
from rollout_service.environments.bridges.textarena.environment import environment as textarena_games
from rollout_service.environments.dataset_files import count_splits
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import Trial, play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from tests.support.games import in_the_library

pytestmark = [pytest.mark.apptainer, pytest.mark.bridges]
Instance = dict[str, JsonValue]
GYMNASIUM_ALONE = """
import json, sys
import gymnasium
request = json.loads(sys.stdin.read())
env = gymnasium.make(request["game"], **request["options"])
first, _ = env.reset(seed=request["seed"])
rewards, over = [], (False, False)
for action in request["actions"]:
    if any(over):
        break
    _, reward, *over, _ = env.step(action)
    rewards.append(float(reward))
print("REPLY", json.dumps({"rewards": rewards, "over": [bool(one) for one in over]}))
"""
GEM_ALONE = """
import json, random, sys, types
import numpy
sys.modules["reasoning_gym"] = module = types.ModuleType("reasoning_gym")
module.factory = types.SimpleNamespace(DATASETS={})
import gem
request = json.loads(sys.stdin.read())
random.seed(request["seed"])  # some games draw as they are made
numpy.random.seed(request["seed"])
env = gem.make(request["game"], **request["options"])
first, info = env.reset(seed=request["seed"])
rewards, over = [], (False, False)
for action in request["actions"]:
    if any(over):
        break
    _, reward, *over, _ = env.step(action)
    rewards.append(float(reward))
print("REPLY", json.dumps(
    {"rewards": rewards, "over": [bool(one) for one in over], "first": first + "\\n" + info.get("suffix", "")}
))
"""
NO_ICE: Instance = {"is_slippery": False}
CALM = [("[down]", 1), ("[1] once more", 1), ("not [up], but [Right]", 2), *[("[down]", 1)], ("[right]", 2)]
TOY_TEXTS: dict[str, tuple[Instance, list[tuple[str, int]]]] = {
    "lake": ({"game": "FrozenLake-v1", "seed": 1, "options": NO_ICE}, [*CALM, ("[right]", 2)]),
    "ice": ({"game": "FrozenLake-v1", "seed": 3}, [("[down]", 1), ("[right]", 2)] * 20),
    "cut short": (
        {"game": "Taxi-v4", "seed": 4, "options": {"max_episode_steps": 3}},
        [("[north]", 1), ("[pickup]", 4), ("[south]", 0)],
    ),
    "cliff": (
        {"game": "CliffWalking-v1", "seed": 1},
        [("[right]", 1), ("[up]", 0), *[("[right]", 1)] * 11, ("[down]", 2)],
    ),
    "blackjack": ({"game": "Blackjack-v1", "seed": 7}, [("[hit]", 1), ("[stick]", 0)]),
}
"""Instances, and what a player says in each with the library's number for it."""
GUESSES = [rf"So \boxed{{{number}}}." for number in range(1, 51)]
GEM_GAMES: dict[str, tuple[Instance, list[str]]] = {
    "guess": ({"game": "game:GuessTheNumber-v0-hard", "seed": 3}, GUESSES),
    "hanoi": (
        {"game": "game:TowerofHanoi-v0-easy", "seed": 1},
        [rf"\boxed{{{move}}}" for move in ("A C", "A B", "C B", "B B", "A C", "B A", "B C", "A C")],
    ),
    "sokoban": ({"game": "game:Sokoban-v0-easy", "seed": 2}, [r"\boxed{up}", r"\boxed{left}", "nothing"]),
    "options": ({"game": "game:GuessTheNumber-v0-easy", "seed": 5, "options": {"max_number": 3}}, GUESSES),
}


async def played(environment: GameEnvironment, instance: Instance, says: list[str], sandboxes: SandboxSource) -> Trial:
    return await play(environment, instance, ScriptedPolicy(says), sandboxes)


def alone(games: GameLibrary, program: str, instance: Instance, actions: list[Any]) -> dict[str, Any]:
    return in_the_library(games, program, {"options": {}, **instance, "actions": actions})


def texts(trial: Trial) -> list[str]:
    """Return what the game said."""
    return [message.content for message in trial.episode.policy.messages if message.role == "user"]


@pytest.mark.parametrize("name", TOY_TEXTS)
async def test_the_rewards_are_gymnasiums_own(name, sandboxes):
    instance, moves = TOY_TEXTS[name]
    trial = await played(gymnasium_games, instance, [text for text, _ in moves], sandboxes)
    expected = alone(GYMNASIUM, GYMNASIUM_ALONE, instance, [action for _, action in moves])
    assert any(expected["over"])
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == pytest.approx(sum(expected["rewards"]))
    assert trial.score.parts["turns"] == len(expected["rewards"])
    assert trial.score.parts["truncated"] == (expected["over"] == [False, True])
    assert trial.score.parts["invalid_actions"] == 0


@pytest.mark.parametrize("name", GEM_GAMES)
async def test_the_rewards_are_gems_own(name, sandboxes):
    instance, says = GEM_GAMES[name]
    trial = await played(gem_games, instance, says, sandboxes)
    expected = alone(GEM, GEM_ALONE, instance, says)
    assert any(expected["over"])
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == pytest.approx(sum(expected["rewards"]))
    assert trial.score.parts["turns"] == len(expected["rewards"])
    assert texts(trial)[0].split() == expected["first"].split()


async def test_what_gem_wants_said_last_ends_each_text(sandboxes):
    instance, says = GEM_GAMES["hanoi"]
    said = texts(await played(gem_games, instance, says, sandboxes))
    assert len(said) == len(says)
    assert all(text.endswith("Enter your move.") for text in said)
    assert "C: [1]" in said[1]


async def test_a_player_sees_the_board_in_words_and_is_told_of_a_text_without_an_action(sandboxes):
    instance, _ = TOY_TEXTS["lake"]
    says = ["Let me think.", "[fly]", *(text for text, _ in CALM), "[right]"]
    trial = await played(gymnasium_games, instance, says, sandboxes)
    first, lost, *_ = said = texts(trial)
    assert "SFFF\nFHFH\nFFFH\nHFFG\nYou are at row 0, column 0." in first
    assert "[left], [down], [right], [up]" in first
    assert lost.startswith("That has no action.")
    assert said[3].endswith("You are at row 1, column 0.")
    assert "\x1b" not in "".join(said)
    assert trial.score.reward == 1.0
    assert trial.score.parts["invalid_actions"] == 2


@pytest.mark.parametrize(
    ("environment", "game", "options", "why"),
    [
        (gymnasium_games, "FrozenLake-v1", {"map_name": [[]]}, "failed: "),
        (gem_games, "game:GuessTheNumber-v0-hard", {"max_number": [[]]}, "failed: "),
        (textarena_games, "GuessTheNumber-v0", {"speed": 8}, "speed"),
    ],
    ids=["gymnasium", "gem", "textarena"],
)
async def test_an_option_that_a_game_cannot_use_is_a_failure(environment, game, options, why, sandboxes):
    with pytest.raises(EnvironmentFailedError, match=why):
        await played(environment, {"game": game, "seed": 1, "options": options}, [], sandboxes)


@pytest.mark.parametrize(
    ("environment", "instance", "path", "message"),
    [
        (gymnasium_games, {"game": "Taxi-v3", "seed": 1}, "instance.game", "did you mean Taxi-v4"),
        (gymnasium_games, {"game": "CartPole-v1", "seed": 1}, "instance.game", "no game 'CartPole-v1'"),
        (gem_games, {"game": "math:Math12K", "seed": 1}, "instance.game", "no game 'math:Math12K'"),
        (gem_games, {"game": "game:Sudoku-v0-easy"}, "instance.seed", "required"),
        (textarena_games, {"game": "Blackjak-v0", "seed": 1}, "instance.game", "did you mean Blackjack-v0"),
        (textarena_games, {"game": "Chess-v0", "seed": 1}, "instance.game", "for one player"),
        (textarena_games, {"game": "GuessTheNumber-v0"}, "instance.seed", "required"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(environment, instance, path, message):
    with pytest.raises(InvalidFieldError) as caught:
        environment.check(instance)
    (field,) = caught.value.fields
    assert field.path == path
    assert message in field.message or message in field.message.lower()


@pytest.mark.parametrize(("environment", "count"), [(gymnasium_games, 6), (gem_games, 20), (textarena_games, 15)])
def test_the_data_set_has_games_of_both_splits(environment, count):
    instances = environment.dataset()
    assert len({instance["game"] for instance in instances}) >= count
    assert set(count_splits(instances)) == {"train", "held_out"}
