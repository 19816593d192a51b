"""The program that runs a library's games: it lists them on the host, and plays one in a sandbox.

It uses the standard library alone. Its arguments are the source of the library's part, and the folder of the library's
packages unless they can be imported already. The part defines `candidates(players)`, which returns the games that there
may be for so many players, and `begin(request)`, which returns a function from an action to a reply, and the first
text.

Requests and replies are lines of JSON: `{"op": "games", "players"}`, `{"op": "reset", "game", "seed", "options"}` and
`{"op": "step", "action"}`. A reply has `text` and `player`, whose turn it is; after an action also `reward`, `done` and
`parts`.

Guarantee: a seed gives the same game, since the process's own generator is seeded here.
"""

import json
import os
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]
Step = Callable[[str], Reply]
SEED = 1


class PlayedGame:
    def __init__(self, source: str) -> None:
        self._part: dict[str, Any] = {"__name__": "library"}
        exec(compile(source, "<library>", "exec"), self._part)  # noqa: S102 - it is a file of this package
        self._step: Step | None = None

    def reset(self, request: Request) -> Reply:
        random.seed(request["seed"])
        self._step, text = self._part["begin"]({"options": {}, **request})
        return {"player": 0, **(text if isinstance(text, dict) else {"text": text})}

    def step(self, request: Request) -> Reply:
        if self._step is None:
            raise ValueError("no game has begun")
        return {"reward": 0.0, "done": False, "parts": {}, "player": 0, **self._step(request["action"])}

    def games(self, request: Request) -> Reply:
        """Return games that begin without a download, the same for the same seed."""
        # As in a sandbox: what this host could download, or has at home, is not there.
        os.environ["HOME"] = "/nonexistent"
        socket.getaddrinfo = _no_network
        players = request["players"]
        names = self._part["candidates"](players)
        return {"games": [name for name in names if self._begins(name, players)]}

    def _begins(self, game: str, players: int) -> bool:
        request = {"game": game, "seed": SEED, "players": players}
        try:
            first, again = (self.reset(request)["text"] for _ in range(2))
        except Exception:  # noqa: BLE001 - libraries raise all kinds of errors for games that cannot be played here
            return False
        return bool(first) and first == again


def _no_network(*_: Any, **__: Any) -> Any:
    raise OSError("games are listed without a network")


def main(source: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that the library prints becomes a reply
    game = PlayedGame(source)
    known = {"games": game.games, "reset": game.reset, "step": game.step}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = known[request["op"]](request)
        except Exception as error:  # noqa: BLE001 - whatever the library raises is reported
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:3]
    main(sys.argv[1])
