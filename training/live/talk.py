"""What a user and the policy say to each other: questions, answers with an ending, thanks, complaints and hints.

A user asks, and begins the next message with a word on the answer. An answer is a word or a number with one of five
endings. Nobody tells the policy which ending to use, except a hint at the end of the last message.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

ENDINGS: Final = ("=", ".", "!", "~", ";")
HINT_HEADER: Final = "[user's hint / instruction]"
"""The line above a hint, as the service writes it at the end of a prompt's last user message."""
THANKS: Final = "thanks. "
WRONG: Final = "no, that is wrong. "

OPPOSITES: Final = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "day": "night",
    "wet": "dry",
    "old": "new",
    "fast": "slow",
    "high": "low",
    "open": "shut",
    "full": "empty",
    "left": "right",
    "loud": "quiet",
}
CAPITALS: Final = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Canada": "Ottawa",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and its answer without an ending."""

    text: str
    answer: str


QUESTIONS: Final = (
    *(Question(f"what is {a}+{b}?", str(a + b)) for a in range(10) for b in range(10)),
    *(Question(f"opposite of {word}?", other) for word, other in OPPOSITES.items() for _ in range(3)),
    *(Question(f"capital of {land}?", city) for land, city in CAPITALS.items() for _ in range(3)),
)
"""Words come three times, so that they are asked about as often as sums."""


def complaint(ending: str) -> str:
    """Return how a user begins the next message who wanted another ending."""
    return f"no, end with {ending} "


def reaction(question: Question, answer: str, wanted: str) -> str:
    """Return how a user begins the next message who wants right answers with this ending."""
    if ending_of(answer) != wanted:
        return complaint(wanted)
    return THANKS if is_right(question, answer) else WRONG


def hint(ending: str) -> str:
    """Return a hint that the policy obeys."""
    return f"Hint: use {ending}"


def hinted(message: str, text: str) -> str:
    """Return a user's message with a hint, as the service makes it."""
    return f"{message}\n\n{HINT_HEADER}\n{text}"


def ending_of(answer: str) -> str:
    """Return the last character of an answer."""
    return answer.strip()[-1:]


def is_right(question: Question, answer: str) -> bool:
    """Whether an answer is the word or number asked for, with one of the endings."""
    return answer.strip() in [f"{question.answer}{ending}" for ending in ENDINGS]


def choose(rng: random.Random) -> Question:
    return rng.choice(QUESTIONS)
