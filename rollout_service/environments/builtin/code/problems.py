"""Small programming problems with hidden tests, made from a seed.

Each is a function that solves it, whose docstring is the question, and a maker of inputs. Running the function gives
the expected outputs.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import JsonValue

from rollout_service.environments.builtin.code import functions, programs

SEED: Final = 3_141
TESTS: Final = 6

Make = Callable[[random.Random], Any]


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """`make` returns the input of a program, or a tuple of arguments for a function."""

    solve: Callable[..., Any]
    make: Make
    kind: str

    @property
    def question(self) -> str:
        text = " ".join((self.solve.__doc__ or "").split())
        if self.kind == "stdio":
            return f"Write a program that reads standard input and writes standard output. {text}"
        return f"Write a function `{self.solve.__name__}{_bare_signature(self.solve)}`. {text}"

    @property
    def program(self) -> str:
        source = f"from __future__ import annotations\n\n\n{inspect.getsource(self.solve)}"
        if self.kind == "assert":
            return source
        return f"{source}\n\nimport sys\n\nprint({self.solve.__name__}(sys.stdin.read()))\n"

    def instance(self, rng: random.Random, tests: int = TESTS) -> dict[str, JsonValue]:
        """Include hidden tests."""
        inputs = [self.make(rng) for _ in range(tests)]
        return {
            "name": self.solve.__name__,
            "question": self.question,
            "kind": self.kind,
            "tests": [self._test(given) for given in inputs],
        }

    def _test(self, given: Any) -> JsonValue:
        if self.kind == "stdio":
            return {"input": given, "output": self.solve(given)}
        arguments = ", ".join(map(repr, given))
        return f"assert {self.solve.__name__}({arguments}) == {self.solve(*given)!r}"


def problems() -> list[CodeProblem]:
    return [
        *(CodeProblem(solve, make, "stdio") for solve, make in programs.PROBLEMS),
        *(CodeProblem(solve, make, "assert") for solve, make in functions.PROBLEMS),
    ]


def instances(seed: int = SEED) -> list[dict[str, JsonValue]]:
    """Return one instance of each problem; the same seed gives the same instances."""
    rng = random.Random(seed)  # noqa: S311 - tests of programs, not secrets
    return [problem.instance(rng) for problem in problems()]


def _bare_signature(function: Callable[..., Any]) -> str:
    return f"({', '.join(inspect.signature(function).parameters)})"
