"""Two environments in Python for training: `steps`, whose tool is needed more than once per task, and `slow`.

To the policy, both look like `calc`: they have the same questions, a tool `python` that is asked to print an
expression, and an answer in a box. The sandbox's bash does the arithmetic. In `steps`, the tool is killed after each
operation and keeps only its intermediate result, so an expression with two operations has a result on the second call.
In `slow`, a call takes a second or two, and sometimes very long, like builds and test suites.

The folder is a plug-in. It works for a service that has it on its PYTHONPATH, as with
`examples/train_calc.py --plug-in`, or, once it has a `pyproject.toml`, installed by pip.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from functools import cache

from pydantic import JsonValue

from rollout_service.environments import (
    Arguments,
    EnvironmentSpec,
    EpisodeLimits,
    FunctionTool,
    SandboxSettings,
    ToolContext,
    ToolInputError,
)
from rollout_service.environments.builtin.calc import Calc, CalcProblem, sample_problems
from sandboxes import BashSession

PRINT = re.compile(r"print\(\s*(\d{1,4}(?:\s*[-+*]\s*\d{1,4})*)\s*\)")
KILLED = "[Python was restarted, its state is lost: it was killed]"
"""The built-in tool's text after it was killed. The tiny policy saw this text, and the tool's name and description, in
its training; with any other words it would never call a second time, and there would be no reward to learn from."""
OPERATIONS = 2
"""The number of operations in every task of `steps`."""
TYPICAL_SECONDS, SPREAD, LONGEST_SECONDS = 1.0, 1.2, 30.0
"""A lognormal delay: its median, the standard deviation of its logarithm, and its upper limit."""
SEED, HELD_OUT, TRAINING = 20_270, 128, 2_048


class Code(Arguments):
    """What the policy writes."""

    code: str


async def one_step(arguments: Code, context: ToolContext) -> str:
    """Evaluate the next operation of an expression; a different expression starts from the beginning."""
    expression, session = _expression(arguments), await _bash(context)
    before = (await session.run('echo "$asked/$left"', timeout=context.seconds)).output.strip()
    asked, _, left = before.partition("/")
    operation = next_operation(left if asked == expression else expression)
    command = f'asked=\'{expression}\'; left="{operation}"; echo "$left"'
    left = (await session.run(command, timeout=context.seconds)).output.strip()
    return left if is_number(left) else KILLED


async def slowly(arguments: Code, context: ToolContext) -> str:
    """Evaluate the whole expression, after a delay."""
    expression, session = _expression(arguments), await _bash(context)
    delay = min(TYPICAL_SECONDS * random.lognormvariate(0.0, SPREAD), LONGEST_SECONDS)
    command = f"sleep {delay:.2f}; echo $(({expression}))"
    return (await session.run(command, timeout=context.seconds)).output.strip()


def next_operation(expression: str) -> str:
    """Return the expression with its first product, or else its first operation, as bash's `$((...))`."""
    found = re.search(r"\d+\*\d+", expression) or re.match(r"-?\d+[-+]\d+", expression)
    if found is None:
        return expression
    return f"{expression[: found.start()]}$(({found[0]})){expression[found.end() :]}"


def is_number(text: str) -> bool:
    """Return whether nothing is left to be calculated."""
    return re.fullmatch(r"-?\d+", text) is not None


def tasks(seed: int, count: int, *, held_out: bool) -> list[CalcProblem]:
    """Return problems with exactly two operations, from one side of `calc`'s own split."""
    found = sample_problems(seed, 8 * count, held_out)
    return [each for each in found if len(re.findall(r"[-+*]", each["expression"])) == OPERATIONS][:count]


class Steps(Calc):
    """`calc` with instances of two operations."""

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [
            {"question": each["question"], "answer": each["answer"], "split": name}
            for name, side in _sides().items()
            for each in side
        ]


@cache
def _sides() -> dict[str, list[CalcProblem]]:
    return {
        "held_out": tasks(SEED, HELD_OUT, held_out=True),
        "train": tasks(SEED, TRAINING, held_out=False),
    }


def _expression(arguments: Code) -> str:
    match = PRINT.fullmatch(arguments.code.strip())
    if match is None:
        raise ToolInputError("SyntaxError: invalid syntax")
    # Bash reads a number that begins with 0 as octal.
    return re.sub(r"\b0+(?=\d)", "", re.sub(r"\s", "", match[1]))


async def _bash(context: ToolContext) -> BashSession:
    if context.sandbox is None:
        raise RuntimeError("this environment has an image, so there is a sandbox")
    return await context.sandbox.bash()


def _tool(function: Callable[[Code, ToolContext], Awaitable[str]]) -> FunctionTool[Code]:
    return FunctionTool("python", "Run code.", Code, function)


def _spec(name: str, description: str) -> EnvironmentSpec:
    return EnvironmentSpec(
        name=name,
        description=description,
        image="base",
        limits=EpisodeLimits(max_turns=6, max_tokens=1_024, max_turn_tokens=96, tool_seconds=60.0),
        sandbox=SandboxSettings(memory="256M", max_processes=64),
    )


steps = Steps(_spec("steps", "Arithmetic, one operation a call."), extra_tools=[_tool(one_step)])
slow = Calc(_spec("slow", "Arithmetic with a tool that often is slow."), extra_tools=[_tool(slowly)])
