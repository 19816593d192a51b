"""Libraries of games as they are without a bridge."""

import json
import subprocess
from typing import Any

from rollout_service.environments.bridges.games.library import GameLibrary


def in_the_library(games: GameLibrary, program: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return what a program prints after the word REPLY, in a process of its own that has the library."""
    done = subprocess.run(
        [games.library.python(), "-sP", "-c", program],
        input=json.dumps(request),
        env={"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.rpartition("REPLY")[2])
    return result
