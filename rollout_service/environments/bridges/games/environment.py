"""Environments of games: a game and a seed are the task, and the policy plays it turn by turn.

Guarantees: the reward is the game's own; each episode's game has its own process in the agent's sandbox, so a seed
gives the same game whatever else is played. A game that fails or hangs fails the rollout.
"""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue, ValidationError

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError, did_you_mean
from rollout_service.base.validation import describe_problems
from rollout_service.environments.bridges.games.library import GameLibrary
from rollout_service.environments.bridges.process import LibraryProcess, library_in_sandbox
from rollout_service.environments.bridges.turns import Consequence, score_turns, take_turns
from rollout_service.environments.contract import Environment, EnvironmentSpec, SandboxSettings
from rollout_service.environments.dataset_files import InstanceFields, read_instance
from rollout_service.episodes import Episode, EpisodeLimits, Score

BEGIN_SECONDS: Final = 60.0
STEP_SECONDS: Final = 30.0
SYSTEM: Final = "You are playing a game. Think first, then end each message with one move in the form that it asks for."
ENV: Final = {"PYTHONHASHSEED": "0"}
"""Otherwise games that go through sets would differ for the same seed."""
COUNTS: Final = {1: "one player", 2: "two players"}


class TextGame(InstanceFields):
    game: str
    seed: int
    options: dict[str, JsonValue] = {}


class GameReply(Consequence):
    """A game's reply to an action, or its first text."""

    player: int = 0
    """Whose turn it is."""


class GamePartner:
    def __init__(self, process: LibraryProcess) -> None:
        self._process = process

    async def begin(self, request: dict[str, JsonValue]) -> str:
        """Return the text before the policy's first move.

        Raises:
            EnvironmentFailedError: The game cannot be begun, or ended before the policy's first move.
        """
        return (await self.reset(request)).text

    async def reset(self, request: dict[str, JsonValue]) -> GameReply:
        return await self._ask({"op": "reset", **request}, BEGIN_SECONDS)

    async def step(self, action: str) -> GameReply:
        return await self._ask({"op": "step", "action": action}, STEP_SECONDS)

    async def _ask(self, request: dict[str, JsonValue], seconds: float) -> GameReply:
        reply = await self._process.ask(request, seconds)
        try:
            return GameReply.model_validate(reply)
        except ValidationError as error:
            reasons = "; ".join(describe_problems(error, GameReply))
            raise EnvironmentFailedError(
                f"the game sent no usable reply to {request['op']!r}: {reasons}",
                hint='A reply is {"text": TEXT, "reward": NUMBER, "done": false, "parts": {NAME: NUMBER}}.',
            ) from error


class GameEnvironment(Environment):
    players = 1
    fields: type[TextGame] = TextGame

    def __init__(self, games: GameLibrary, name: str, description: str) -> None:
        self._games = games
        self._inside = f"/opt/{games.library.name}"
        library = games.library
        self.spec = EnvironmentSpec(
            name=name,
            description=f"{description}; `env install {library.name}` installs it.",
            image="base",
            limits=EpisodeLimits(max_turns=64, max_tokens=32_768, max_turn_tokens=2_048),
            sandbox=SandboxSettings(memory="1G", max_processes=64),
            binds={self._inside: str(library.packages)} if library.is_installed else {},
        )

    def check(self, instance: dict[str, JsonValue]) -> None:
        game = read_instance(self.fields, instance).game
        known = self._games.names(self.players)
        if game not in known:
            message = f"there is no game {game!r} for {COUNTS[self.players]}{did_you_mean(game, known)}"
            raise InvalidFieldError.at("instance.game", message)

    async def run(self, episode: Episode) -> StopReason:
        sandbox, name = episode.require_sandbox(), self._games.library.name
        command = self._games.command("python3", self._inside)
        async with library_in_sandbox(sandbox, command, name, env=ENV) as process:
            partner = self.partner(process, episode)
            game = read_instance(self.fields, episode.instance)
            request = {**game.model_dump(mode="json"), "players": self.players}
            first = await partner.begin(request)
            messages = [Message(role="system", content=SYSTEM), Message(role="user", content=first)]
            return await take_turns(episode, messages, partner)

    def partner(self, process: LibraryProcess, episode: Episode) -> GamePartner:
        _ = episode  # for games that depend on it
        return GamePartner(process)

    async def evaluate(self, episode: Episode) -> Score:
        return score_turns(episode)

    def dataset(self) -> list[dict[str, JsonValue]]:
        return self._games.tasks(self.players)
