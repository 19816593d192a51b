"""`gymnasium`: the toy texts of Gymnasium, turn by turn; `games/environment.py` has the guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollout_service.environments.bridges.games.environment import GameEnvironment
from rollout_service.environments.bridges.games.library import GameLibrary, game_library

GYMNASIUM: Final = game_library("gymnasium", Path(__file__).parent)


class GymnasiumToyText(GameEnvironment):
    """Instances: a game and a seed."""

    def __init__(self, games: GameLibrary = GYMNASIUM) -> None:
        super().__init__(games, "gymnasium", "FrozenLake, Taxi, Blackjack and CliffWalking of Gymnasium")


environment = GymnasiumToyText()
