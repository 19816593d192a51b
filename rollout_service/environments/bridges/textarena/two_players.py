"""`textarena-two-players`: games of TextArena for two, of whom the policy is one and the engines of a pool the other.

Guarantees: the reward is the policy's own; of what the opponent samples, a trajectory has only what the game shows of
its moves. An opponent that gives no whole move fails the rollout, and is never a victory.
"""

from __future__ import annotations

from typing import Literal

import anyio
from pydantic import Field, JsonValue

from api_schemas.base import Name
from api_schemas.trajectories import Message
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.games.environment import (
    SYSTEM,
    GameEnvironment,
    GamePartner,
    GameReply,
    TextGame,
)
from rollout_service.environments.bridges.process import LibraryProcess
from rollout_service.environments.bridges.textarena.environment import TEXTARENA
from rollout_service.environments.contract import EnvironmentSettings, Replayable
from rollout_service.environments.dataset_files import read_instance
from rollout_service.episodes import ContextFullError, Episode
from rollout_service.judging.contract import SampledText, TextSampler

MAX_MOVES = 64
"""Moves of the opponent in a row before the game counts as failed, such as illegal ones that the game lets repeat."""


class OpponentSettings(EnvironmentSettings):
    pool: Name = "opponent"
    """Plays the other side; it should not be the pool that is trained."""
    max_tokens: int = Field(2_048, ge=1)
    """Tokens of a move, with the reasoning before it."""
    temperature: float = Field(1.0, ge=0)
    move_seconds: float = Field(120.0, gt=0)


class MatchGame(TextGame):
    seat: Literal[0, 1] | None = None
    """Which player the policy is; without it, an even seed makes it player 0, and an odd one player 1."""
    opponent: OpponentSettings = OpponentSettings()


class PoolOpponent:
    """A player that is sampled from a pool, with its own conversation."""

    def __init__(self, sampler: TextSampler, settings: OpponentSettings) -> None:
        self._sampler = sampler
        self._settings = settings
        self._messages = [Message(role="system", content=SYSTEM)]

    async def move(self, text: str) -> str:
        """
        Raises:
            EnvironmentFailedError: The move was cut off by a limit.
        """
        self._messages.append(Message(role="user", content=text))
        pool = self._settings.pool
        said = await self._sample()
        if said.truncated:
            raise EnvironmentFailedError(
                f"a move of the opponent in the pool {pool!r} was cut off after {said.sampled_tokens} tokens",
                hint="Raise `opponent.max_tokens`, or serve the pool with a model that moves in fewer.",
            )
        self._messages.append(Message(role="assistant", content=said.text))
        return said.text

    async def _sample(self) -> SampledText:
        own = self._settings
        try:
            with anyio.fail_after(own.move_seconds):
                return await self._sampler.sample(
                    own.pool, self._messages, max_tokens=own.max_tokens, temperature=own.temperature
                )
        except TimeoutError:
            raise EnvironmentFailedError(
                f"the opponent in the pool {own.pool!r} made no move within {own.move_seconds:g} s",
                hint="Give the pool more engines, or raise `opponent.move_seconds`.",
            ) from None
        except ContextFullError as error:
            raise EnvironmentFailedError(
                f"the game no longer fits the context of the opponent in the pool {own.pool!r}: {error}",
                hint="Serve the pool with a longer context, or leave this game out.",
            ) from error


class PoolMatch(GamePartner):
    def __init__(self, process: LibraryProcess, opponent: PoolOpponent, seat: int) -> None:
        super().__init__(process)
        self._opponent = opponent
        self._seat = seat

    async def begin(self, request: dict[str, JsonValue]) -> str:
        reply = await self._until_own_turn(await self.reset({**request, "seat": self._seat}))
        if reply.done:
            raise EnvironmentFailedError(
                f"the opponent ended the game before the policy's first move: {reply.text}",
                hint="Use an opponent that plays by the rules of this game, or let the policy begin.",
            )
        return reply.text

    async def step(self, action: str) -> GameReply:
        return await self._until_own_turn(await super().step(action))

    async def _until_own_turn(self, reply: GameReply) -> GameReply:
        for _ in range(MAX_MOVES):
            if reply.done or reply.player == self._seat:
                return reply
            reply = await super().step(await self._opponent.move(reply.text))
        raise EnvironmentFailedError(
            f"the opponent made {MAX_MOVES} moves, and it is still not the policy's turn",
            hint="Use an opponent that plays by the rules of this game.",
        )


class TextArenaMatch(GameEnvironment):
    """Instances may have the policy's seat and the opponent."""

    players = 2
    fields = MatchGame
    replayable: Replayable = "never"
    """The opponent's moves are sampled, and differ another time."""

    def __init__(self) -> None:
        super().__init__(TEXTARENA, "textarena-two-players", "Games of TextArena against the engines of a pool")

    def partner(self, process: LibraryProcess, episode: Episode) -> GamePartner:
        game = read_instance(MatchGame, episode.instance)
        seat = game.seed % 2 if game.seat is None else game.seat
        return PoolMatch(process, PoolOpponent(episode.require_sampler(), game.opponent), seat)


environment = TextArenaMatch()
