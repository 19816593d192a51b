"""`gymnasium`: the toy texts of Gymnasium, turn by turn; `games/environment.py` has the guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollout_service.environments.bridges.games.environment import GameEnvironment
from rollout_service.environments.bridges.games.library import game_library

GYMNASIUM: Final = game_library("gymnasium", Path(__file__).parent)
environment = GameEnvironment(GYMNASIUM, "gymnasium", "FrozenLake, Taxi, Blackjack and CliffWalking of Gymnasium")
