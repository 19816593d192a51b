"""The part of the games' worker for GEM; `games/worker.py` describes the calls.

GEM imports reasoning-gym, with 40 packages, only to list tasks that have a bridge of their own: here it gets an empty
list.

Guarantee: the text that a game appends to each of its observations is kept.
"""

import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

Reply = dict[str, Any]
KIND = "game:"


def load() -> Any:
    listed = ModuleType("reasoning_gym")
    vars(listed)["factory"] = SimpleNamespace(DATASETS={})
    sys.modules.setdefault("reasoning_gym", listed)
    import gem

    return gem


def candidates(players: int) -> list[str]:
    _ = players  # all are for one
    load()
    from gem.envs.registration import ENV_REGISTRY

    return [name for name in sorted(ENV_REGISTRY) if name.startswith(KIND)]


def begin(request: dict[str, Any]) -> tuple[Callable[[str], Reply], str]:
    game, seed = request["game"], request["seed"]
    gem = load()
    import numpy

    if not game.startswith(KIND):
        raise ValueError(f"{game} is not one of GEM's games")
    # Games draw from the generators of the process, some as they are made.
    random.seed(seed)
    numpy.random.seed(seed)
    env = gem.make(game, **request["options"])
    text, info = env.reset(seed=seed)

    def step(action: str) -> Reply:
        text, reward, terminated, truncated, info = env.step(action)
        done = bool(terminated or truncated)
        return {
            "text": text if done else joined(text, info),
            "reward": float(reward),
            "done": done,
            "parts": {"truncated": float(truncated)},
        }

    return step, joined(text, info)


def joined(text: str, info: dict[str, Any]) -> str:
    suffix = str(info.get("suffix", ""))
    return f"{text.rstrip()}\n{suffix}" if suffix else text
