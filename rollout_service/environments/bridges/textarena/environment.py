"""`textarena`: games of TextArena for one player, turn by turn; `games/environment.py` has the guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollout_service.environments.bridges.games.environment import GameEnvironment
from rollout_service.environments.bridges.games.library import game_library

TEXTARENA: Final = game_library("textarena", Path(__file__).parent, players=(1, 2))
environment = GameEnvironment(TEXTARENA, "textarena", "Games of TextArena for one player")
