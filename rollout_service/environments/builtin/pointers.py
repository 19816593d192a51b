"""`pointers`: add values that are two look-ups away each, in fewer steps than one agent needs.

An agent that reads everything itself is right within the budget only for two values. One that assigns each value to a
sub-agent in one turn is done in five steps.
"""

from __future__ import annotations

import random
from typing import Final

from pydantic import JsonValue

from rollout_service.environments.builtin import lookups
from rollout_service.environments.builtin.lookups import (
    LookupEnvironment,
    LookupInstance,
    LookupProblem,
    coordinate,
    letters,
    value,
)
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn
from rollout_service.environments.dataset_files import read_instance

DATASET_SEED = 30_260

SPEC = EnvironmentSpec(
    name="pointers",
    description="Add values that are two look-ups away each, alone or with sub-agents, within six steps.",
    tools=["finish"],
    limits=lookups.LIMITS,
    parallel=lookups.PARALLEL,
    evaluate_in=EvaluateIn.NONE,
)


class Pointers(LookupEnvironment):
    """Instances: `question`, `names` of keys, and `cells` in which each key holds a name that holds a number."""

    def expected(self, instance: dict[str, JsonValue]) -> int:
        fields = read_instance(LookupInstance, instance)
        pointers = [fields.cells.get(key, "") for key in fields.names]
        cells = [fields.cells.get(pointer, "") for pointer in pointers]
        return lookups.add_numbers(cells, "must hold, for each of `names`, a name that holds a number")


# All keys, pointers and orders are random in each task, so nothing but reading finds a value.

SIZES: Final = (2, 3, 4)
"""Values of a task."""


def make_problem(rng: random.Random, size: int) -> LookupProblem:
    names = letters(rng, 2 * size)
    keys, pointers = names[:size], [coordinate(rng, letter) for letter in names[size:]]
    held = dict(zip(keys, pointers, strict=True)) | {pointer: value(rng) for pointer in pointers}
    cells = {name: held[name] for name in rng.sample(sorted(held), len(held))}
    return LookupProblem(question=f"Add {' '.join(keys)}.", names=keys, cells=cells)


environment = Pointers(SPEC, make_problem, SIZES, DATASET_SEED)
