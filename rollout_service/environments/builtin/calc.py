r"""`calc`: arithmetic with a Python tool; right when the last `\boxed{...}` is the exact integer."""

from __future__ import annotations

import ast
import operator
import random
import re
import zlib
from functools import cache
from typing import Final, TypedDict

from pydantic import JsonValue

from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.math.environment import last_boxed
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, Replayable, SandboxSettings
from rollout_service.episodes import Episode, EpisodeLimits, Score

INTEGER = re.compile(r"-?\d{1,1000}", re.ASCII)
DATASET_SEED = 20_260
HELD_OUT_PROBLEMS = 128
TRAINING_PROBLEMS = 4_096
"""A policy trained for minutes sees no problem twice."""

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


# An expression's own hash decides whether it is held out, so the sides need no list of questions, and the shipped
# policies never saw a held-out expression.

MAX_DIGITS: Final = 4
HELD_OUT_SHARE: Final = 16  # one expression in this many is held out

_PHRASINGS: Final = (
    "What is {}?",
    "Compute {}.",
    "Calculate {}",
    "Please evaluate {}.",
    "{} = ?",
    "How much is {}?",
    "Find the value of {}.",
    "What does {} equal?",
    "Tell me {}.",
    "Work out {}.",
    "Can you compute {}?",
    "Give me the result of {}.",
    "{}",
    "{}=?",
    "I need the value of {}.",
    "Solve: {}",
    "Use the tool to get {}.",
    "Evaluate the expression {}",
    "What's {}?",
    "Could you please calculate {} for me?",
    "Answer in \\boxed{{}}: {}",
    "Question: {}",
)
_OPERATORS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class CalcProblem(TypedDict):
    """The expression has no spaces; the answer has decimal digits."""

    question: str
    expression: str
    answer: str


def make_problem(rng: random.Random) -> CalcProblem:
    """Use one to three of `+ - *` over numbers of up to four digits; some questions have spaces."""
    expression = _number(rng)
    for _ in range(rng.choices((1, 2, 3), weights=(4, 3, 2))[0]):
        expression += rng.choice("+-*") + _number(rng)
    shown = _spaced(expression) if rng.random() < 0.3 else expression
    question = rng.choice(_PHRASINGS).format(shown)
    return CalcProblem(question=question, expression=expression, answer=str(evaluate_expression(expression)))


def is_held_out(expression: str) -> bool:
    """`expression` has no spaces."""
    return zlib.crc32(expression.encode()) % HELD_OUT_SHARE == 0


def sample_problems(seed: int, n: int, held_out: bool) -> list[CalcProblem]:
    """Return problems of one side; the same seed gives the same problems."""
    rng = random.Random(seed)  # noqa: S311 - questions, not secrets
    problems: list[CalcProblem] = []
    while len(problems) < n:
        problem = make_problem(rng)
        if is_held_out(problem["expression"]) == held_out:
            problems.append(problem)
    return problems


def evaluate_expression(expression: str) -> int:
    """Evaluate integers under `+ - *`, unary minus and brackets.

    Raises:
        ValueError: The expression contains anything else.
    """
    # Before Python 3.11.4, the parser raises another error for a NUL character.
    expression = expression.strip().replace("\0", "?")
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an arithmetic expression: {expression[:80]!r}") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("only integers, + - * and brackets are evaluated")


def _number(rng: random.Random) -> str:
    digits = rng.randint(1, MAX_DIGITS)
    low = 10 ** (digits - 1) if digits > 1 else 0
    return str(rng.randint(low, 10**digits - 1))


def _spaced(expression: str) -> str:
    for sign in "+-*":
        expression = expression.replace(sign, f" {sign} ")
    return expression


@cache
def _splits() -> dict[str, list[CalcProblem]]:
    return {
        "held_out": sample_problems(DATASET_SEED, HELD_OUT_PROBLEMS, held_out=True),
        "train": sample_problems(DATASET_SEED + 1, TRAINING_PROBLEMS, held_out=False),
    }


def expected_integer(instance: dict[str, JsonValue]) -> int:
    """
    Raises:
        InvalidFieldError: The instance has no integer as its answer.
    """
    answer = instance.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    if isinstance(answer, str) and INTEGER.fullmatch(answer):
        return int(answer)
    message = "must be an integer, or its decimal digits as a string" if "answer" in instance else "is missing"
    raise InvalidFieldError.at("instance.answer", message)


environment = Calc(SPEC)
