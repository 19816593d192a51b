"""The game: replies to lines of JSON with lines of JSON; its rewards add up, and nothing else of it is scored."""

import json
import re
import sys
from typing import Any

Reply = dict[str, Any]


class NumberGame:
    """A number is to be found within a number of guesses."""

    def __init__(self, instance: dict[str, Any]) -> None:
        self.number, self.highest = instance["number"], instance["highest"]
        self.left = instance["guesses"]

    def begin(self) -> Reply:
        """Return the first reply to the player."""
        return {"text": f"I think of a number from 1 to {self.highest}. You have {self.left} guesses."}

    def step(self, action: str) -> Reply:
        """Return the reply to an action; any text is one."""
        self.left -= 1
        said = re.findall(r"\[\s*(\d{1,9})\s*\]", action)
        guess = int(said[-1]) if said else None
        if guess == self.number:
            return {
                "text": "You found it.",
                "reward": 1.0,
                "done": True,
                "parts": {"guesses_left": self.left},
            }
        hint = "That is no guess." if guess is None else f"It is {'higher' if guess < self.number else 'lower'}."
        if self.left == 0:
            return {"text": f"{hint} It was {self.number}.", "done": True, "parts": {"guesses_left": 0}}
        return {"text": f"{hint} You have {self.left} more."}


def main() -> None:
    """Play one game: `{"op": "reset", "instance": ...}`, then `{"op": "step", "action": ...}` again and again."""
    game = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "reset":
            game = NumberGame(request["instance"])
            reply = game.begin()
        elif game is not None:
            reply = game.step(request["action"])
        else:
            reply = {"error": "no game has begun"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
