"""A game that a program of a folder is: its rewards add up, and whatever it does wrong is a failure."""

from pathlib import Path

import pytest

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.games.declared_game import DeclaredGame, load_game
from rollout_service.environments.registry import load_path
from rollout_service.environments.wrapped import Solving
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy

DECLARATION = """
kind = "game"
name = "mine"
system = "You play {{ instance.what }}."
command = "python3 /environment/game.py"
[solution]
command = "cat /environment/actions.txt"
"""
LOOP = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "reset":
        print(json.dumps({"text": "Begin " + request["instance"]["what"]}))
        continue
    action = request["action"]
    REPLY
"""
GAME = LOOP.replace(
    "REPLY",
    """print(json.dumps({"text": action, "reward": 0.5, "done": action == "end", "parts": {"length": len(action)}}))""",
)
INSTANCE = {"what": "chess"}


def game(folder: Path, program: str = GAME, actions: str = "a\nend\n") -> DeclaredGame:
    (folder / "environment.toml").write_text(DECLARATION)
    (folder / "game.py").write_text(program)
    (folder / "actions.txt").write_text(actions)
    loaded = load_path(folder)
    assert isinstance(loaded, DeclaredGame)
    return loaded


async def test_the_program_replies_until_it_ends_the_game(tmp_path, sandboxes):
    trial = await play(game(tmp_path), dict(INSTANCE), ScriptedPolicy(["one", "end"]), sandboxes)
    assert trial.stop_reason is StopReason.FINISHED
    assert trial.score.reward == 1.0
    assert trial.score.parts["length"] == 3.0
    said = [message.content for message in trial.episode.policy.messages]
    assert said == ["You play chess.", "Begin chess", "one", "one", "end"]


async def test_the_solution_plays_what_it_prints(tmp_path, sandboxes):
    environment = game(tmp_path)
    assert environment.has_solution
    assert environment.findings() == []
    trial = await play(Solving(environment), dict(INSTANCE), ScriptedPolicy([]), sandboxes)
    assert trial.score.reward == 1.0
    with pytest.raises(EnvironmentFailedError, match="actions, 1 in all, did not end the game"):
        await play(Solving(game(tmp_path, actions="a\n")), dict(INSTANCE), ScriptedPolicy([]), sandboxes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("sys.exit('out of cards')", "ended, or sent something else"),
        ("print('a move')", "ended, or sent something else"),
        ("print(json.dumps({'error': 'no such card'}))", "failed: no such card"),
        ("print(json.dumps({'reward': 1.0}))", "no usable reply to 'step': text"),
        ("print(json.dumps({'text': '', 'reward': float('nan')}))", "no usable reply to 'step': reward"),
        ("print(json.dumps({'text': '', 'rewards': 1}))", "unknown field"),
        ("print(json.dumps({'text': '', 'reward': '1'}))", "no usable reply to 'step': reward"),
    ],
    ids=["ends", "no JSON", "error", "no text", "not a number", "unknown field", "a text as the reward"],
)
async def test_a_program_that_plays_wrong_fails_the_rollout(reply, why, tmp_path, sandboxes):
    environment = game(tmp_path, LOOP.replace("REPLY", reply))
    with pytest.raises(EnvironmentFailedError, match=why) as caught:
        await play(environment, dict(INSTANCE), ScriptedPolicy(["one"]), sandboxes)
    if "out of cards" in reply:
        assert "out of cards" in caught.value.hint


def test_an_instance_that_lacks_a_field_of_the_prompt_is_refused(tmp_path):
    with pytest.raises(InvalidFieldError):
        game(tmp_path).check({})


def test_what_is_wrong_with_a_declaration_is_said(tmp_path):
    environment = game(tmp_path)
    (tmp_path / "game.py").unlink()
    assert load_game(tmp_path).findings() == ["command: there is no file game.py"]
    assert environment.spec.image == "base"
    (tmp_path / "environment.toml").write_text('kind = "game"\nname = "mine"\ncomand = "x"\n')
    with pytest.raises(ConfigurationError, match="did you mean command"):
        load_game(tmp_path)
    (tmp_path / "environment.toml").write_text("kind = ")
    with pytest.raises(ConfigurationError, match="is not valid TOML"):
        load_game(tmp_path)
    (tmp_path / "environment.toml").unlink()
    with pytest.raises(ConfigurationError, match=r"environment\.toml cannot be read"):
        load_game(tmp_path)
