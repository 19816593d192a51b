"""With the real library, a game against a pool gives the policy's own reward, and trains on nothing of the opponent."""

from typing import Any

import anyio
import pytest
from pydantic import HttpUrl, JsonValue

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutRequest, RolloutState, StopReason
from api_schemas.tasks import Task
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.textarena.environment import TEXTARENA
from rollout_service.environments.bridges.textarena.two_players import TextArenaMatch
from rollout_service.episodes import ContextFullError
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import OtherModels, Trial, play
from rollout_service.settings import PipelineSettings
from rollout_service.testing.scripted_policy import ScriptedPolicy
from rollout_service.tokens import ChatRenderer
from sandboxes import ApptainerConfig
from tests.support.games import in_the_library
from tests.support.gateway.service import POLICY, gateway_service, scripted
from tests.support.sampling import Said, ScriptedSampler

pytestmark = [pytest.mark.apptainer, pytest.mark.bridges]
Instance = dict[str, JsonValue]
ALONE = """
import json, random, sys
import textarena
request = json.loads(sys.stdin.read())
random.seed(request["seed"])
env = textarena.make(request["game"])
env.reset(num_players=2, seed=request["seed"])
says = [iter(request["says"][0]), iter(request["says"][1])]
done = False
while not done:
    player, _ = env.get_observation()
    done, _ = env.step(next(says[player]))
rewards, _ = env.close()
print("REPLY", json.dumps({"rewards": [rewards[0], rewards[1]]}))
"""
PLAYS: dict[str, tuple[Instance, list[list[str]]]] = {
    "player 0 wins": ({"game": "TicTacToe-v0", "seed": 2}, [["[0]", "[1]", "[2]"], ["[3]", "[4]"]]),
    "player 1 wins": ({"game": "Nim-v0", "seed": 1}, [["[0 3]", "[1 4]"], ["no move", "[1 0]"]]),
    "by skill": (
        {"game": "Nim-v0", "seed": 3, "seat": 0},
        [["[0 3]", "[2 1]", "[1 3]"], ["[1 1]", "[2 1]", "[2 3]"]],
    ),
    "a draw": (
        {"game": "TicTacToe-v0", "seed": 4, "seat": 1},
        [["[0]", "[2]", "[3]", "[7]", "[8]"], ["[4]", "[1]", "[5]", "[6]"]],
    ),
}
"""Instances, and what the players say in each."""


def opponent_saying(*says: Said, truncated: bool = False) -> ScriptedSampler:
    return ScriptedSampler(*says, truncated=truncated, tokens=7)


def seat_of(instance: Instance) -> int:
    seat = instance.get("seat", int(str(instance["seed"])) % 2)
    return int(str(seat))


async def played(
    instance: Instance, says: list[str], opponent: ScriptedSampler | None, sandboxes: SandboxSource
) -> Trial:
    return await play(TextArenaMatch(), instance, ScriptedPolicy(says), sandboxes, OtherModels(sampler=opponent))


@pytest.mark.parametrize("name", PLAYS)
async def test_the_reward_is_the_policys_own(name, sandboxes):
    instance, says = PLAYS[name]
    seat = seat_of(instance)
    opponent = opponent_saying(*says[1 - seat])
    trial = await played(instance, says[seat], opponent, sandboxes)
    expected: dict[str, Any] = in_the_library(TEXTARENA, ALONE, {**instance, "says": says})
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == expected["rewards"][seat]
    assert set(opponent.asked_for) == {("opponent", 2_048, 1.0)}


async def test_both_players_see_each_others_moves_and_not_their_own_twice(sandboxes):
    opponent = opponent_saying("I take [3].", "Then [4].")
    instance: Instance = {"game": "TicTacToe-v0", "seed": 2}
    trial = await played(instance, ["My move is [0].", "And [1].", "[2]"], opponent, sandboxes)
    seen = [message.content for message in trial.episode.policy.messages if message.role == "user"]
    assert "You are Player 0" in seen[0]
    assert "[Player 1] I take [3]." in seen[1]
    assert "My move" not in "".join(seen)
    (system, first, own, second) = opponent.prompts[1]
    assert system == trial.episode.policy.messages[0]
    assert "You are Player 1" in first.content
    assert "[Player 0] My move is [0]." in first.content
    assert (own.role, own.content) == ("assistant", "I take [3].")
    assert "[Player 0] And [1]." in second.content


async def test_illegal_moves_of_either_side_are_told_apart(sandboxes):
    instance: Instance = {"game": "TicTacToe-v0", "seed": 2}
    won = await played(instance, ["[0]"], opponent_saying("no", "no"), sandboxes)
    assert (won.score.reward, won.score.parts["opponent_invalid_move"]) == (1.0, 1.0)
    lost = await played(instance, ["no", "no"], ScriptedSampler(None), sandboxes)
    assert (lost.score.reward, lost.score.parts["invalid_move"]) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("opponent", "fields", "why"),
    [
        (opponent_saying("[0", truncated=True), {"seat": 0}, "'opponent' was cut off after 7 tokens"),
        (opponent_saying(None), {"seat": 0, "opponent": {"move_seconds": 0.1}}, "no move within 0.1 s"),
        (opponent_saying(ContextFullError("full")), {"seat": 0}, "no longer fits the context"),
        (opponent_saying("no", "no"), {"seat": 1}, "ended the game before the policy's first move"),
        (None, {"seat": 0}, "no engines here"),
    ],
    ids=["truncated", "too slow", "context full", "gives up", "no engines"],
)
async def test_an_opponent_that_cannot_play_is_a_failure(opponent, fields, why, sandboxes):
    with pytest.raises(EnvironmentFailedError, match=why) as caught:
        await played({"game": "TicTacToe-v0", "seed": 1, **fields}, ["[4]"], opponent, sandboxes)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("instance", "path"),
    [
        ({"game": "GuessTheNumber-v0", "seed": 1}, "instance.game"),
        ({"game": "Nim-v0", "seed": 1, "seat": 2}, "instance.seat"),
        ({"game": "Nim-v0", "seed": 1, "opponent": {"model": "x"}}, "instance.opponent.model"),
        ({"game": "Nim-v0", "seed": 1, "opponent": {"pool": "a b"}}, "instance.opponent.pool"),
    ],
)
def test_a_match_that_cannot_be_played_is_refused(instance, path):
    with pytest.raises(InvalidFieldError) as caught:
        TextArenaMatch().check(instance)
    assert {field.path for field in caught.value.fields} == {path}


async def test_nothing_that_the_opponents_pool_samples_is_trained_on(tmp_path):
    policy_says, opponent_says = ["Mine: [0].", "Mine: [1].", "Mine: [2]."], ["Yours: [3].", "Yours: [4]."]
    task = Task(environment="textarena-two-players", instance={"game": "TicTacToe-v0", "seed": 2})
    service_settings = {"sandbox": ApptainerConfig(), "pipeline": PipelineSettings(max_attempts=1)}
    with anyio.fail_after(120):
        async with (
            scripted(*policy_says) as policy,
            scripted(*opponent_says) as opponent,
            gateway_service(tmp_path, [policy], **service_settings) as service,
        ):
            await service.client.add_backend(BackendSpec(url=HttpUrl(opponent.url), pool="opponent"))
            before = opponent.requests
            await service.client.submit(RolloutRequest(rollout_id="r", task=task))
            rollout = await service.client.wait("r", timeout_seconds=100)
            assert opponent.requests == before + len(opponent_says)
    assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, 1.0)
    sampled = [
        token
        for segment in rollout.trajectory.segments
        for token, trains in zip(segment.token_ids, segment.loss_mask, strict=True)
        if trains
    ]
    text = ChatRenderer.load(POLICY).decode(sampled)
    assert all(said in text for said in policy_says)
    assert "Yours" not in text
