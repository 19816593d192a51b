"""The program that runs TextArena: lists its games on the host, and plays one in a sandbox.

It uses the standard library and TextArena alone, since the interpreter of either place runs it. Requests and replies
are lines of JSON: `{"op": "games"}`, `{"op": "reset", "game", "seed", "options"}` and `{"op": "step", "action"}`.

Guarantee: a seed gives the same game, since the games draw from the process's own generator, which is seeded here.
"""

import json
import os
import random
import socket
import sys
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]
PLAYER = 0
SEED = 1


class SeededGame:
    """The game that is played."""

    def __init__(self) -> None:
        self._env: Any = None
        self._seen = 0

    def reset(self, request: Request) -> Reply:
        """Begin a game, and return what the player sees first."""
        textarena = _textarena()
        random.seed(request["seed"])
        self._env, self._seen = textarena.make(request["game"], **request.get("options", {})), 0
        self._env.reset(num_players=1, seed=request["seed"])
        if not isinstance(self._env.state, textarena.SinglePlayerState):
            raise ValueError(f"{request['game']} is not a game for one player")  # noqa: TRY004 - a wrong request
        return {"text": self._news()}

    def step(self, request: Request) -> Reply:
        """Make a move, and return what the player sees of it; at the end, also the reward."""
        done, _ = self._env.step(request["action"])
        if not done:
            return {"text": self._news()}
        rewards, info = self._env.close()
        end = info.get(PLAYER, {})
        return {
            "text": str(end.get("reason", "")),
            "done": True,
            "reward": float(rewards[PLAYER]),
            "invalid": bool(end.get("invalid_move")),
        }

    def _news(self) -> str:
        """Return what was said since the last call, without the player's own words."""
        self._env.get_observation()
        said = self._env.full_observations.get(PLAYER, [])
        news, self._seen = said[self._seen :], len(said)
        return "\n".join(str(message) for sender, message, _ in news if sender != PLAYER)


def list_games() -> Reply:
    """Return the games for one player that begin without any download, the same for the same seed."""
    # As in a sandbox: what this host could download, or has at home, is not there.
    os.environ["HOME"] = "/nonexistent"
    socket.getaddrinfo = _no_network
    from textarena.envs.registration import ENV_REGISTRY

    return {"games": [name for name in sorted(ENV_REGISTRY) if name.endswith("-v0") and _begins(name)]}


def _no_network(*_: Any, **__: Any) -> Any:
    raise OSError("games are listed without a network")


def _begins(game: str) -> bool:
    try:
        first, again = (SeededGame().reset({"game": game, "seed": SEED})["text"] for _ in range(2))
    except Exception:  # noqa: BLE001 - the library raises all kinds of errors for games that cannot be played here
        return False
    return bool(first) and first == again


def _textarena() -> Any:
    import textarena

    return textarena


def main() -> None:
    """Reply to requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that the library prints becomes a reply
    game = SeededGame()
    known = {"games": lambda _: list_games(), "reset": game.reset, "step": game.step}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = known[request["op"]](request)
        except Exception as error:  # noqa: BLE001 - whatever the library raises is reported
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
    main()
