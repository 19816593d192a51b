"""Problems whose solution is a function.

Each function stands alone, so its source is a submission (see `problems`).
"""

import random
from collections.abc import Callable
from typing import Any, Final


def is_leap_year(year: int) -> bool:
    """It tells whether a year is a leap year of the Gregorian calendar."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def digit_sum(number: int) -> int:
    """It returns the sum of the decimal digits of an integer, whatever its sign."""
    return sum(int(digit) for digit in str(abs(number)))


def second_largest(numbers: list[int]) -> int | None:
    """It returns the second largest of the different values in a list, or None if there are fewer than two."""
    values = sorted(set(numbers))
    return values[-2] if len(values) > 1 else None


def run_lengths(text: str) -> list[tuple[str, int]]:
    """It returns the runs of equal characters in a string, in order, as a list of tuples (character, length)."""
    runs: list[tuple[str, int]] = []
    for character in text:
        if runs and runs[-1][0] == character:
            runs[-1] = (character, runs[-1][1] + 1)
        else:
            runs.append((character, 1))
    return runs


def roman(number: int) -> str:
    """It returns an integer from 1 to 3999 as a Roman numeral in capital letters."""
    values = (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L")
    text = ""
    for value, letters in (*values, (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        text += letters * (number // value)
        number %= value
    return text


def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """It merges closed intervals [low, high] that overlap or touch in a point, and returns them as lists, sorted by
    low.
    """
    merged: list[list[int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged


def group_by_length(words: list[str]) -> dict[int, list[str]]:
    """It returns a dict from each length to the words of that length, in their order."""
    groups: dict[int, list[str]] = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    return groups


def common_items(first: list[int], second: list[int]) -> set[int]:
    """It returns the set of the values that are in both lists."""
    return set(first) & set(second)


def rotate(items: list[int], steps: int) -> list[int]:
    """It returns a list moved to the right by a number of steps, which may be negative; what falls off comes in
    again on the other side.
    """
    if not items:
        return []
    steps %= len(items)
    return items[-steps:] + items[:-steps] if steps else items[:]


def longest_rise(numbers: list[int]) -> int:
    """It returns the length of the longest strictly increasing subsequence, whose elements need not be neighbours."""
    best: list[int] = []
    for index, number in enumerate(numbers):
        best.append(1 + max((best[i] for i in range(index) if numbers[i] < number), default=0))
    return max(best, default=0)


def edit_distance(first: str, second: str) -> int:
    """It returns the least number of insertions, deletions and replacements of a character that make the second
    string of the first.
    """
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def flatten(nested: list[Any]) -> list[int]:
    """It returns the integers of a list of integers and lists, nested to any depth, in order."""
    flat: list[int] = []
    for item in nested:
        flat += flatten(item) if isinstance(item, list) else [item]
    return flat


def _numbers(rng: random.Random, low: int = -20, high: int = 20) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(0, 10))]


def _text(rng: random.Random, letters: str = "abc") -> str:
    return "".join(rng.choices(letters, k=rng.randint(0, 12)))


def _intervals(rng: random.Random) -> list[list[int]]:
    return [sorted(rng.sample(range(30), 2)) for _ in range(rng.randint(1, 7))]


def _nested(rng: random.Random, depth: int = 3) -> list[Any]:
    return [
        _nested(rng, depth - 1) if depth and rng.random() < 0.4 else rng.randint(0, 9) for _ in range(rng.randint(0, 4))
    ]


PROBLEMS: Final[tuple[tuple[Callable[..., Any], Callable[[random.Random], tuple[Any, ...]]], ...]] = (
    (is_leap_year, lambda rng: (rng.choice((rng.randint(1600, 2400), rng.randint(16, 24) * 100)),)),
    (digit_sum, lambda rng: (rng.randint(-(10**9), 10**9),)),
    (second_largest, lambda rng: (_numbers(rng),)),
    (run_lengths, lambda rng: (_text(rng),)),
    (roman, lambda rng: (rng.randint(1, 3999),)),
    (merge_intervals, lambda rng: (_intervals(rng),)),
    (group_by_length, lambda rng: ([_text(rng) for _ in range(rng.randint(0, 6))],)),
    (common_items, lambda rng: (_numbers(rng, 0, 9), _numbers(rng, 0, 9))),
    (rotate, lambda rng: (_numbers(rng), rng.randint(-12, 12))),
    (longest_rise, lambda rng: (_numbers(rng),)),
    (edit_distance, lambda rng: (_text(rng), _text(rng))),
    (flatten, lambda rng: (_nested(rng),)),
)
