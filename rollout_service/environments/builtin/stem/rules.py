"""What rules can decide about an answer: a letter of several, a number with its unit, the same words.

Guarantee: a verdict is certain by the rule; whatever the rules cannot read or compare is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from rollout_service.environments.builtin.stem.quantities import Quantity, read_quantity
from rollout_service.environments.builtin.stem.units import Unit

TOLERANCE: Final = 0.01
"""The relative tolerance of numbers, unless a task has its own; integers without a unit must be exact."""
_EXACT: Final = 1e-9
_LETTER = re.compile(r"(?:\\(?:text|mathrm|textbf)\{)?\(?([A-Za-z])[).:}]*(?:\s+(\S.*))?$", re.DOTALL)
_WORD = re.compile(r"\\(?:text|mathrm|textbf)\b|[\W_]+")


class RuleVerdict(StrEnum):
    """What a rule says about an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"


def compare_choice(gold: str, answer: str, choices: Mapping[str, str]) -> RuleVerdict:
    """Compare a choice, given as its letter or its text, with the letter of the right one."""
    letters = {letter for letter, text in choices.items() if same_words(text, answer)}
    if not letters and (found := _LETTER.match(answer.strip())) is not None:
        letter, text = found[1].upper(), found[2]
        if text is None or same_words(choices.get(letter, ""), text):
            letters = {letter}
    return RuleVerdict.RIGHT if letters == {gold.upper()} else RuleVerdict.WRONG


def compare_quantity(
    gold: Quantity, answer: str, tolerance: float | None = None, unit: Unit | None = None
) -> RuleVerdict:
    """Compare a number with the right one; `unit` is the one in which the question asks for bare numbers."""
    given = read_quantity(answer)
    if given is None:
        return RuleVerdict.UNDECIDED
    if unit is not None:
        gold = gold.in_unit(unit) if gold.is_bare else gold
        given = given.in_unit(unit) if given.is_bare else given
    if tolerance is None:
        tolerance = _EXACT if gold.is_integer and gold.is_bare else TOLERANCE
    equal = gold.equals(given, tolerance)
    if equal is None:
        return RuleVerdict.UNDECIDED
    return RuleVerdict.RIGHT if equal else RuleVerdict.WRONG


def same_words(one: str, other: str) -> bool:
    """Return whether two texts are the same but for case, spaces and punctuation around words."""
    words = _words(one)
    return bool(words) and words == _words(other)


def _words(text: str) -> list[str]:
    if re.search(r"[\d+=<>^*/-]", text):  # signs carry meaning beside digits, as in `2-` and `Fe2+`
        return text.casefold().split()
    return _WORD.sub(" ", text).casefold().split()
