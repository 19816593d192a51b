"""Tasks of `pointers`: keys, each of which holds a pointer to its value.

Guarantee: all keys, pointers and orders are random in each task, so nothing but reading finds a value.
"""

from __future__ import annotations

import random
from typing import Final

from rollout_service.environments.builtin.lookups import LookupProblem, coordinate, letters, value

SIZES: Final = (2, 3, 4)
"""How many values a task asks for."""


def make_problem(rng: random.Random, size: int) -> LookupProblem:
    """Make a task that asks for `size` values."""
    names = letters(rng, 2 * size)
    keys, pointers = names[:size], [coordinate(rng, letter) for letter in names[size:]]
    held = dict(zip(keys, pointers, strict=True)) | {pointer: value(rng) for pointer in pointers}
    cells = {name: held[name] for name in rng.sample(sorted(held), len(held))}
    return LookupProblem(question=f"Add {' '.join(keys)}.", names=keys, cells=cells)
