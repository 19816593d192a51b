"""Tasks of `split`: an index that names items, each of which holds a value.

Guarantee: all names and orders are random in each task, so nothing can be read before the index.
"""

from __future__ import annotations

import random
from typing import Final

from rollout_service.environments.builtin.lookups import LookupProblem, coordinate, letters, value

SIZES: Final = (4, 6, 8)
"""How many items a task has."""
QUESTION: Final = "Add all."


def make_problem(rng: random.Random, size: int) -> LookupProblem:
    """Make a task of `size` items."""
    items = [coordinate(rng, letter) for letter in letters(rng, size)]
    return LookupProblem(question=QUESTION, names=items, cells={item: value(rng) for item in items})
