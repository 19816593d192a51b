"""Problems whose solution is a program: each function maps the input's text to the output's.

Each function stands alone, so its source is a submission (see `problems`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

LETTERS: Final = "abcdefghij"
WORDS: Final = ("red", "green", "blue", "tree", "stone", "river", "cloud", "moon", "sand", "light")


def sum_lines(text: str) -> str:
    """Each line holds one integer. Print their sum."""
    return str(sum(int(line) for line in text.split()))


def reverse_words(text: str) -> str:
    """One line of words. Print the words in reverse order, separated by one space."""
    return " ".join(reversed(text.split()))


def most_common_letter(text: str) -> str:
    """One line of lower-case letters. Print the one that occurs most often; among equals the first in the alphabet."""
    line = text.strip()
    return min(set(line), key=lambda letter: (-line.count(letter), letter))


def binary_of(text: str) -> str:
    """One non-negative integer. Print it in binary, without leading zeros."""
    return format(int(text), "b")


def running_maximum(text: str) -> str:
    """One line of integers. Print a line with the largest of the first 1, 2, 3, ... of them."""
    best, out = None, []
    for number in map(int, text.split()):
        best = number if best is None else max(best, number)
        out.append(str(best))
    return " ".join(out)


def prime_factors(text: str) -> str:
    """One integer of at least 2. Print its prime factors in rising order, repeated as often as they divide it,
    separated by spaces.
    """
    number, factor, out = int(text), 2, []
    while number > 1:
        while number % factor == 0:
            out.append(str(factor))
            number //= factor
        factor += 1
    return " ".join(out)


def balanced_brackets(text: str) -> str:
    """One line of the brackets ()[]{}. Print `yes` if they are balanced and properly nested, else `no`."""
    stack: list[str] = []
    for bracket in text.strip():
        if bracket in "([{":
            stack.append(bracket)
        elif not stack or stack.pop() + bracket not in ("()", "[]", "{}"):
            return "no"
    return "no" if stack else "yes"


def transpose(text: str) -> str:
    """A matrix, one row of integers a line. Print its transpose in the same form."""
    rows = [line.split() for line in text.strip().splitlines()]
    return "\n".join(" ".join(column) for column in zip(*rows, strict=True))


def word_counts(text: str) -> str:
    """One line of words. Print `word count` for each different word, one a line, in alphabetical order."""
    words = text.split()
    return "\n".join(f"{word} {words.count(word)}" for word in sorted(set(words)))


def caesar(text: str) -> str:
    """The first line is a shift, the second lower-case letters. Print the letters moved forward in the alphabet by
    the shift, from z on to a.
    """
    shift, line = text.split()
    return "".join(chr((ord(letter) - 97 + int(shift)) % 26 + 97) for letter in line)


def grid_paths(text: str) -> str:
    """Lines of `.` and `#`. Print how many ways lead from the top left to the bottom right corner, moving only right
    or down and never onto a `#`. Both corners are `.`.
    """
    rows = text.split()
    ways = [1] + [0] * (len(rows[0]) - 1)
    for row in rows:
        for column, cell in enumerate(row):
            left = ways[column - 1] if column else 0
            ways[column] = 0 if cell == "#" else ways[column] + left
    return str(ways[-1])


def smallest_change(text: str) -> str:
    """The first line holds coin values, the second an amount. Print the fewest coins that make the amount, or -1 if
    none do.
    """
    first, second = text.strip().splitlines()
    coins, amount = [int(coin) for coin in first.split()], int(second)
    best = [0] + [amount + 1] * amount
    for target in range(1, amount + 1):
        best[target] = min([best[target - coin] + 1 for coin in coins if coin <= target], default=amount + 1)
    return str(best[amount] if best[amount] <= amount else -1)


def _integers(rng: random.Random, low: int, high: int, separator: str = " ") -> str:
    return separator.join(str(rng.randint(low, high)) for _ in range(rng.randint(3, 9))) + "\n"


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(4, 12))) + "\n"


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(5, 30)))


def _brackets(rng: random.Random) -> str:
    text = ""
    for _ in range(rng.randint(2, 5)):
        pair = rng.choice(("()", "[]", "{}"))
        text = rng.choice((pair[0] + text + pair[1], text + pair))
    return (text if rng.random() < 0.6 else text[::-1]) + "\n"


def _matrix(rng: random.Random) -> str:
    columns = rng.randint(1, 5)
    rows = ([str(rng.randint(-9, 9)) for _ in range(columns)] for _ in range(rng.randint(1, 5)))
    return "\n".join(" ".join(row) for row in rows) + "\n"


def _grid(rng: random.Random) -> str:
    width, height = rng.randint(2, 8), rng.randint(2, 8)
    cells = [["#" if rng.random() < 0.2 else "." for _ in range(width)] for _ in range(height)]
    cells[0][0] = cells[-1][-1] = "."
    return "\n".join("".join(row) for row in cells) + "\n"


def _coins(rng: random.Random) -> str:
    coins = sorted(rng.sample(range(2, 20), 3))
    return f"{' '.join(map(str, coins))}\n{rng.randint(1, 90)}\n"


PROBLEMS: Final[tuple[tuple[Callable[[str], str], Callable[[random.Random], str]], ...]] = (
    (sum_lines, lambda rng: _integers(rng, -999, 999, "\n")),
    (reverse_words, _words),
    (most_common_letter, lambda rng: _letters(rng) + "\n"),
    (binary_of, lambda rng: f"{rng.randint(0, 10**6)}\n"),
    (running_maximum, lambda rng: _integers(rng, -50, 50)),
    (prime_factors, lambda rng: f"{rng.randint(2, 5_000)}\n"),
    (balanced_brackets, _brackets),
    (transpose, _matrix),
    (word_counts, _words),
    (caesar, lambda rng: f"{rng.randint(1, 25)}\n{_letters(rng)}\n"),
    (grid_paths, _grid),
    (smallest_change, _coins),
)
