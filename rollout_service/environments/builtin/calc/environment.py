r"""`calc`: arithmetic with a Python tool; right when the last `\boxed{...}` is the exact integer."""

from __future__ import annotations

import re
from functools import cache

from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.boxed import last_boxed
from rollout_service.environments.builtin.calc.problems import CalcProblem, sample_problems
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, Replayable, SandboxSettings
from rollout_service.episodes import Episode, EpisodeLimits, Score

INTEGER = re.compile(r"-?\d{1,1000}", re.ASCII)
DATASET_SEED = 20_260
HELD_OUT_PROBLEMS = 128
TRAINING_PROBLEMS = 4_096
"""Enough that a policy trained for minutes sees no problem twice and memorizes none."""

SPEC = EnvironmentSpec(
    name="calc",
    description=r"Arithmetic with a Python tool; the answer is an integer in \boxed{}.",
    image="base",
    tools=["python"],
    limits=EpisodeLimits(
        max_turns=4,
        max_tokens=1_024,
        max_turn_tokens=256,
        agent_seconds=120.0,
        tool_seconds=10.0,
        tool_output_chars=256,
    ),
    sandbox=SandboxSettings(memory="512M", max_processes=64),
    evaluate_in=EvaluateIn.NONE,
)


class Calc(AgentEnvironment):
    """Instances: `question`, and `answer` as an integer or its decimal digits."""

    replayable: Replayable = "answer"

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        expected_integer(instance)

    async def evaluate(self, episode: Episode) -> Score:
        boxed = last_boxed(episode.answer)
        given = INTEGER.fullmatch(boxed) if boxed is not None else None
        right = given is not None and int(given.group()) == expected_integer(episode.instance)
        return Score(float(right), {"boxed": float(boxed is not None), "integer": float(given is not None)})

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [
            {"question": problem["question"], "answer": problem["answer"], "split": split}
            for split, problems in _splits().items()
            for problem in problems
        ]


@cache
def _splits() -> dict[str, list[CalcProblem]]:
    return {
        "held_out": sample_problems(DATASET_SEED, HELD_OUT_PROBLEMS, held_out=True),
        "train": sample_problems(DATASET_SEED + 1, TRAINING_PROBLEMS, held_out=False),
    }


def expected_integer(instance: dict[str, JsonValue]) -> int:
    """Return the right answer.

    Raises:
        InvalidFieldError: The instance has no integer as its answer.
    """
    answer = instance.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    if isinstance(answer, str) and INTEGER.fullmatch(answer):
        return int(answer)
    message = (
        "must be an integer, or its decimal digits as a string" if "answer" in instance else "is missing"
    )
    raise InvalidFieldError([FieldError(path="instance.answer", message=message)])


environment = Calc(SPEC)
