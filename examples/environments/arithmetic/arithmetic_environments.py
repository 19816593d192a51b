"""Two environments in Python for training: `steps`, whose tool is needed more than once a task, and `slow`.

Both look like `calc` to the policy: the same question, a tool `python` that is asked to print an expression, and an
answer in a box. Behind it the sandbox's own bash calculates. With `steps`, the tool is killed when it has made one
operation, and only what it has reckoned is kept: asked for an expression of two, it has no result until it is asked a
second time. With `slow` an answer takes a second or two, and now and then very long, as builds and test suites do.

The folder is a plug-in: it works for a service that has it on its PYTHONPATH, as `examples/train_calc.py --plug-in`
does, or installed by pip once it has a `pyproject.toml`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from functools import cache

from pydantic import JsonValue

from rollout_service.agents.errors import ToolInputError
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolContext
from rollout_service.environments.builtin.calc.environment import Calc
from rollout_service.environments.builtin.calc.problems import CalcProblem, sample_problems
from rollout_service.environments.contract import EnvironmentSpec, EpisodeLimits, SandboxSettings
from sandboxes import BashSession

PRINT = re.compile(r"print\(\s*(\d{1,4}(?:\s*[-+*]\s*\d{1,4})*)\s*\)")
KILLED = "[Python was restarted, its state is lost: it was killed]"
"""What the built-in tool says then. The tiny policy has read it before, as it has the tool's name and description; in
words that it has not it would never ask a second time, and there would be no reward to learn from."""
OPERATIONS = 2
"""The operations of every task of `steps`."""
TYPICAL_SECONDS, SPREAD, LONGEST_SECONDS = 1.0, 1.2, 30.0
"""A lognormal delay: the median, the standard deviation of its logarithm, and where it is cut."""
SEED, HELD_OUT, TRAINING = 20_270, 128, 2_048


class Code(Arguments):
    """What the policy writes."""

    code: str


async def one_step(arguments: Code, context: ToolContext) -> str:
    """Make the next operation of an expression; another expression than before begins anew."""
    expression, session = _expression(arguments), await _bash(context)
    before = (await session.run('echo "$asked/$left"', timeout=context.seconds)).output.strip()
    asked, _, left = before.partition("/")
    operation = next_operation(left if asked == expression else expression)
    command = f'asked=\'{expression}\'; left="{operation}"; echo "$left"'
    left = (await session.run(command, timeout=context.seconds)).output.strip()
    return left if is_number(left) else KILLED


async def slowly(arguments: Code, context: ToolContext) -> str:
    """Make all operations, after a while."""
    expression, session = _expression(arguments), await _bash(context)
    delay = min(TYPICAL_SECONDS * random.lognormvariate(0.0, SPREAD), LONGEST_SECONDS)
    command = f"sleep {delay:.2f}; echo $(({expression}))"
    return (await session.run(command, timeout=context.seconds)).output.strip()


def next_operation(expression: str) -> str:
    """The expression with its first product, or else its first operation, written as bash's `$((...))`."""
    found = re.search(r"\d+\*\d+", expression) or re.match(r"-?\d+[-+]\d+", expression)
    if found is None:
        return expression
    return f"{expression[: found.start()]}$(({found[0]})){expression[found.end() :]}"


def is_number(text: str) -> bool:
    """Whether nothing is left to be calculated."""
    return re.fullmatch(r"-?\d+", text) is not None


def tasks(seed: int, count: int, *, held_out: bool) -> list[CalcProblem]:
    """Problems of exactly two operations, on one side of `calc`'s own split."""
    found = sample_problems(seed, 8 * count, held_out)
    return [each for each in found if len(re.findall(r"[-+*]", each["expression"])) == OPERATIONS][:count]


class Steps(Calc):
    """Instances as those of `calc`, of two operations."""

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
    # Bash takes a number that begins with 0 for an octal one.
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
