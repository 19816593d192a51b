"""`split`: read an index, then add all that it names, in fewer steps than one agent needs.

Only for the smallest index can one agent read all items within the budget. The others must be divided evenly among up
to four sub-agents, after the index was read.
"""

from __future__ import annotations

import random
from typing import Final

from pydantic import JsonValue

from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolContext
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

DATASET_SEED = 40_260

SPEC = EnvironmentSpec(
    name="split",
    description="Read an index and add all that it names, alone or with sub-agents, within six steps.",
    tools=["finish"],
    limits=lookups.LIMITS,
    parallel=lookups.PARALLEL,
    evaluate_in=EvaluateIn.NONE,
)


class Nothing(Arguments):
    pass


async def _index(arguments: Nothing, context: ToolContext) -> str:  # noqa: ARG001 - it has none
    names = context.instance["names"]
    return index_text([str(name) for name in names] if isinstance(names, list) else [])


def index_text(names: list[str]) -> str:
    return " ".join(names)


INDEX = FunctionTool("index", "List the keys.", Nothing, _index, parallel=True)


class Split(LookupEnvironment):
    """Instances: `question`, `names` of items in the order of the index, and `cells` in which each holds a number."""

    def expected(self, instance: dict[str, JsonValue]) -> int:
        fields = read_instance(LookupInstance, instance)
        cells = [fields.cells.get(name, "") for name in fields.names]
        return lookups.add_numbers(cells, "must hold a number for each of `names`")


# All names and orders are random in each task, so nothing can be read before the index.

SIZES: Final = (4, 6, 8)
"""Items of a task."""
QUESTION: Final = "Add all."


def make_problem(rng: random.Random, size: int) -> LookupProblem:
    items = [coordinate(rng, letter) for letter in letters(rng, size)]
    return LookupProblem(question=QUESTION, names=items, cells={item: value(rng) for item in items})


environment = Split(SPEC, make_problem, SIZES, DATASET_SEED, tools=[INDEX])
