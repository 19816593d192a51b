"""The base of `pointers` and `split`: named cells, a tool that reads one, and a sum as the answer.

Guarantees:
- The answer `37+12` is as right as `49`, so a policy that can copy can be right, and is trained to divide the work.
- The cells' own hash decides whether a task is held out, and the shipped policy never saw a held-out one.
"""

from __future__ import annotations

import random
import re
import string
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Final, TypedDict

from pydantic import Field, JsonValue

from rollout_service.agents.parallel.settings import ParallelSettings, SubagentSettings
from rollout_service.agents.tool_calling.tools import (
    Arguments,
    FunctionTool,
    Tool,
    ToolContext,
    ToolInputError,
)
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec, Replayable
from rollout_service.environments.dataset_files import InstanceFields
from rollout_service.episodes import Episode, EpisodeLimits, Score

HELD_OUT_SHARE: Final = 16  # one task in this many is held out
HELD_OUT_PROBLEMS: Final = 128
TRAINING_PROBLEMS: Final = 4_096
MAX_CRITICAL_STEPS: Final = 6
SUM: Final = re.compile(r"\s*\d{1,9}(\s*\+\s*\d{1,9}){0,63}\s*", re.ASCII)

LIMITS: Final = EpisodeLimits(
    max_turns=12,
    max_tokens=512,
    max_turn_tokens=96,
    agent_seconds=600.0,
    tool_output_chars=256,
)
PARALLEL: Final = ParallelSettings(
    max_assigns_per_turn=8,
    max_width=4,
    max_critical_steps=MAX_CRITICAL_STEPS,
    charge_direct_calls=True,
    result_chars=256,
    subagent=SubagentSettings(max_turns=10, max_tokens=256, max_turn_tokens=48),
)
"""Too tight for an agent that works alone on any but the smallest tasks."""

Name = Annotated[str, Field(min_length=1, max_length=32)]


class LookupInstance(InstanceFields):
    question: str
    names: Annotated[list[Name], Field(min_length=1, max_length=64)]
    cells: Annotated[dict[Name, Name], Field(max_length=1_024)]
    """Each has a number of up to nine digits, or another name."""


class LookupProblem(TypedDict):
    question: str
    names: list[str]
    cells: dict[str, str]


Make = Callable[[random.Random, int], LookupProblem]


class CellKey(Arguments):
    key: str


async def _read(arguments: CellKey, context: ToolContext) -> str:
    cells = context.instance["cells"]
    held = cells.get(arguments.key) if isinstance(cells, Mapping) else None
    if held is None:
        raise ToolInputError("there is nothing")
    return str(held)


READ: Final = FunctionTool("read", "Read what a key holds.", CellKey, _read, parallel=True)


def score_sum(episode: Episode, expected: int) -> Score:
    """Give 1 for the right sum within the budget of steps, else 0.

    Raises:
        EnvironmentFailedError: It is not known how many steps the agent took.
    """
    if episode.work is None:
        raise EnvironmentFailedError(
            "the steps of this rollout are not known",
            hint="Roll the task out with the environment's own agent, which counts them.",
        )
    given = written_sum(episode.answer)
    right, in_time = given == expected, episode.work.scheduled_steps <= MAX_CRITICAL_STEPS
    return Score(
        float(right and in_time),
        {"sum": float(given is not None), "right": float(right), "in_time": float(in_time)},
    )


def written_sum(answer: str | None) -> int | None:
    """Return the value of a text such as `37+12`; None if it is not a sum of whole numbers."""
    if answer is None or SUM.fullmatch(answer) is None:
        return None
    return sum(map(int, answer.split("+")))


def add_numbers(texts: list[str], problem: str) -> int:
    """
    Raises:
        InvalidFieldError: One is not a number, which is the `problem` of the cells.
    """
    values = [written_sum(text) for text in texts if "+" not in text]
    known = [value for value in values if value is not None]
    if len(known) < len(texts):
        raise InvalidFieldError.at("instance.cells", problem)
    return sum(known)


def letters(rng: random.Random, count: int) -> list[str]:
    return rng.sample(string.ascii_uppercase, count)


def coordinate(rng: random.Random, letter: str) -> str:
    return f"{letter}{rng.randint(0, 9)}"


def value(rng: random.Random) -> str:
    return str(rng.randint(10, 99))


def is_held_out(problem: LookupProblem) -> bool:
    """The order of cells does not matter."""
    text = " ".join(f"{name}={held}" for name, held in sorted(problem["cells"].items()))
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def sample_problems(make: Make, sizes: Sequence[int], seed: int, n: int, held_out: bool) -> list[LookupProblem]:
    """Make each size in turn, all held out or none; the same seed gives the same tasks."""
    rng = random.Random(seed)  # noqa: S311 - tasks, not secrets
    problems: list[LookupProblem] = []
    while len(problems) < n:
        problem = make(rng, sizes[len(problems) % len(sizes)])
        if is_held_out(problem) == held_out:
            problems.append(problem)
    return problems


def as_instance(problem: LookupProblem) -> dict[str, JsonValue]:
    return {
        "question": problem["question"],
        "names": list(problem["names"]),
        "cells": dict(problem["cells"]),
    }


def instances(make: Make, sizes: Sequence[int], seed: int) -> list[dict[str, JsonValue]]:
    splits = {
        "held_out": sample_problems(make, sizes, seed, HELD_OUT_PROBLEMS, held_out=True),
        "train": sample_problems(make, sizes, seed + 1, TRAINING_PROBLEMS, held_out=False),
    }
    return [as_instance(problem) | {"split": split} for split, problems in splits.items() for problem in problems]


class LookupEnvironment(AgentEnvironment):
    """Gives the agent and its sub-agents the tool `read`, and the agent `tools` besides."""

    replayable: Replayable = "never"  # the score depends on the steps, which an answer does not tell

    def __init__(
        self,
        spec: EnvironmentSpec,
        make: Make,
        sizes: Sequence[int],
        seed: int,
        *,
        tools: Sequence[Tool] = (),
    ) -> None:
        super().__init__(spec, extra_tools=[*tools, READ], subagent_tools=[READ])
        self._make = make
        self._sizes = sizes
        self._seed = seed

    @abstractmethod
    def expected(self, instance: dict[str, JsonValue]) -> int:
        """
        Raises:
            InvalidFieldError: The instance cannot be used.
        """

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        self.expected(instance)

    async def evaluate(self, episode: Episode) -> Score:
        return score_sum(episode, self.expected(episode.instance))

    def dataset(self) -> list[dict[str, JsonValue]]:
        return self._dataset

    @cached_property
    def _dataset(self) -> list[dict[str, JsonValue]]:
        return instances(self._make, self._sizes, self._seed)
