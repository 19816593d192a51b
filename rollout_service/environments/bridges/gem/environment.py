"""`gem`: the games of GEM, turn by turn; `games/environment.py` has the guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollout_service.environments.bridges.games.environment import GameEnvironment
from rollout_service.environments.bridges.games.library import game_library

GEM: Final = game_library("gem", Path(__file__).parent)
environment = GameEnvironment(GEM, "gem", "Games of GEM")
