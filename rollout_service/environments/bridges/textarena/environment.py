"""`textarena`: games of TextArena for one player, turn by turn.

Guarantees: the reward is what the game itself gives; the game runs in the agent's sandbox, in a process of its own for
each episode, so that a seed gives the same game whatever else is played. A game that fails or hangs fails the rollout.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, JsonValue

from api_schemas.errors import FieldError
from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.environments.bridges.process import LibraryProcess, library_in_sandbox
from rollout_service.environments.bridges.textarena.library import TASKS, TEXTARENA, WORKER
from rollout_service.environments.bridges.turns import Consequence, score_turns, take_turns
from rollout_service.environments.contract import Environment, EnvironmentSpec, SandboxSettings
from rollout_service.environments.dataset_files import read_instances
from rollout_service.environments.instance_fields import read_instance
from rollout_service.environments.libraries import Library
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.errors import InvalidFieldError, did_you_mean

INSIDE: Final = "/opt/textarena"
"""The path of the library's packages in the sandbox."""
BEGIN_SECONDS: Final = 60.0
STEP_SECONDS: Final = 30.0
SYSTEM: Final = (
    "You are playing a game. Think first, then end each message with one move in the form that it asks for."
)
SPEC = EnvironmentSpec(
    name="textarena",
    description="Games of TextArena for one player; `env install textarena` installs it.",
    image="base",
    limits=EpisodeLimits(max_turns=64, max_tokens=32_768, max_turn_tokens=2_048),
    sandbox=SandboxSettings(memory="1G", max_processes=64),
)


class TextGame(BaseModel):
    """The fields of an instance."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    game: str
    """The library's id, such as `GuessTheNumber-v0`."""
    seed: int
    options: dict[str, JsonValue] = {}
    """Arguments of the game, such as `max_number`."""


class TextArena(Environment):
    """Instances: a game and a seed."""

    def __init__(self, library: Library = TEXTARENA) -> None:
        self._library = library
        binds = {INSIDE: str(library.packages)} if library.is_installed else {}
        self.spec = SPEC.model_copy(update={"binds": binds})

    def check(self, instance: dict[str, JsonValue]) -> None:
        """Reject a game that cannot be played here.

        Raises:
            ConfigurationError: The library is not installed.
            InvalidFieldError: A field is missing or wrong, or there is no such game.
        """
        game = read_instance(TextGame, instance).game
        known = {str(one["game"]) for one in self.dataset()}
        if game not in known:
            message = f"there is no game {game!r} for one player{did_you_mean(game, known)}"
            raise InvalidFieldError([FieldError(path="instance.game", message=message)])

    async def run(self, episode: Episode) -> StopReason:
        sandbox = episode.require_sandbox()
        # Without fixed hashes, games that go through sets would differ for the same seed.
        command, env = ["python3", "-sP", "-c", _worker(), INSIDE], {"PYTHONHASHSEED": "0"}
        async with library_in_sandbox(sandbox, command, "textarena", env=env) as process:
            game = read_instance(TextGame, episode.instance)
            first = await process.ask({"op": "reset", **game.model_dump(mode="json")}, BEGIN_SECONDS)
            messages = [
                Message(role="system", content=SYSTEM),
                Message(role="user", content=str(first["text"])),
            ]
            return await take_turns(episode, messages, _Game(process))

    async def evaluate(self, episode: Episode) -> Score:
        return score_turns(episode)

    def dataset(self) -> list[dict[str, JsonValue]]:
        """Return the instances that were made when the library was installed.

        Raises:
            ConfigurationError: The library is not installed.
        """
        return [dict(one) for one in _tasks(self._library.python().parents[1] / TASKS)]


class _Game:
    """A game as the other side of an episode."""

    def __init__(self, process: LibraryProcess) -> None:
        self._process = process

    async def step(self, action: str) -> Consequence:
        reply = await self._process.ask({"op": "step", "action": action}, STEP_SECONDS)
        if not reply.get("done"):
            return Consequence(str(reply["text"]))
        parts = {"invalid_move": float(reply["invalid"])}
        return Consequence(str(reply["text"]), float(reply["reward"]), done=True, parts=parts)


@cache
def _worker() -> str:
    return WORKER.read_text()


@cache
def _tasks(path: Path) -> list[dict[str, JsonValue]]:
    return read_instances(path)


environment = TextArena()
