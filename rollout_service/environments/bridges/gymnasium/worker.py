"""The part of the games' worker for Gymnasium's toy texts; `games/worker.py` describes the calls.

Gymnasium's actions and observations are numbers; `act` and `show` of a game translate them from and to text.

Guarantee: a text without an action changes nothing in the game; it is counted, and the reply says so.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Reply = dict[str, Any]
Show = Callable[[Any, Any], str]
COLOR = re.compile(r"\x1b\[[0-9;]*m")
BRACKETS = re.compile(r"\[\s*([a-z0-9]+)\s*\]", re.IGNORECASE)
ACES = ("no usable ace", "a usable ace")
STOPS = ("R", "G", "Y", "B", "the taxi")
"""In the order of their numbers."""


class ToyText(NamedTuple):
    goal: str
    actions: tuple[str, ...]
    """In the order of their numbers."""
    show: Show
    render_mode: str | None = "ansi"


def act(text: str, actions: tuple[str, ...]) -> int | None:
    """Return the last action in brackets, such as `[left]` or `[0]`."""
    numbers: Mapping[str, int] = {
        **{str(number): number for number in range(len(actions))},
        **{name: number for number, name in enumerate(actions)},
    }
    found = BRACKETS.findall(text)
    return numbers.get(found[-1].lower()) if found else None


def _board(env: Any) -> str:
    """Drop colors; the text names the marked place instead."""
    return COLOR.sub("", env.render()).strip("\n")


def _place(state: Any, columns: int) -> str:
    row, column = divmod(int(state), columns)
    return f"row {row}, column {column}"


def show_lake(env: Any, state: Any) -> str:
    return f"{_board(env)}\nYou are at {_place(state, env.unwrapped.ncol)}."


def show_cliff(env: Any, state: Any) -> str:
    return f"{_board(env)}\nYou are at {_place(state, env.unwrapped.shape[1])}, marked with an x."


def show_taxi(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.unwrapped.decode(int(state))
    waits = f"The passenger is in the taxi. The destination is {STOPS[destination]}."
    if STOPS[passenger] != STOPS[-1]:
        waits = f"The passenger waits at {STOPS[passenger]}. The destination is {STOPS[destination]}."
    return f"{_board(env)}\nThe taxi is at row {row}, column {column}. {waits}"


def show_blackjack(env: Any, state: Any) -> str:
    _ = env
    total, dealer, ace = (int(value) for value in state)
    return f"Your cards make {total}, with {ACES[ace]}. The dealer shows {dealer}."


FROZEN_LAKE = ToyText(
    "Cross the frozen lake from S to G over the ice F without falling into a hole H. The ice may be slippery.",
    ("left", "down", "right", "up"),
    show_lake,
)
CLIFF = ToyText(
    "Walk from x to T without stepping on the cliff C, which takes you back to the start.",
    ("up", "right", "down", "left"),
    show_cliff,
)
TOY_TEXTS: dict[str, ToyText] = {
    "FrozenLake-v1": FROZEN_LAKE,
    "FrozenLake8x8-v1": FROZEN_LAKE,
    "CliffWalking-v1": CLIFF,
    "CliffWalkingSlippery-v1": CLIFF,
    "Taxi-v4": ToyText(
        "Drive the taxi to the passenger, pick it up, drive it to its destination, and drop it off there. Walls | "
        "cannot be crossed; streets lead through the colons.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        show_taxi,
    ),
    "Blackjack-v1": ToyText(
        "Get closer to 21 than the dealer without going over it.",
        ("stick", "hit"),
        show_blackjack,
        render_mode=None,
    ),
}


def candidates(players: int) -> list[str]:
    _ = players  # all are for one
    return sorted(TOY_TEXTS)


def begin(request: dict[str, Any]) -> tuple[Callable[[str], Reply], str]:
    import gymnasium

    toy = TOY_TEXTS[request["game"]]
    options = {} if toy.render_mode is None else {"render_mode": toy.render_mode}
    env = gymnasium.make(request["game"], **{**request["options"], **options})
    state, _ = env.reset(seed=request["seed"])
    game = _ToyGame(env, toy)
    return game.step, f"{toy.goal}\n{game.ask()}\n\n{toy.show(env, state)}"


class _ToyGame:
    def __init__(self, env: Any, toy: ToyText) -> None:
        self._env, self._toy, self._invalid = env, toy, 0

    def ask(self) -> str:
        return f"Your actions are {', '.join(f'[{name}]' for name in self._toy.actions)}."

    def step(self, text: str) -> Reply:
        action = act(text, self._toy.actions)
        if action is None:
            self._invalid += 1
            return {"text": f"That has no action. {self.ask()}", "parts": self._parts(0)}
        state, reward, terminated, truncated, _ = self._env.step(action)
        return {
            "text": self._toy.show(self._env, state),
            "reward": float(reward),
            "done": bool(terminated or truncated),
            "parts": self._parts(bool(truncated and not terminated)),
        }

    def _parts(self, cut: float) -> dict[str, float]:
        return {"invalid_actions": float(self._invalid), "truncated": float(cut)}
