"""Training examples of the environment `calc`: questions, calls of the tool `python`, and answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout_service.environments.builtin.calc import CalcProblem, is_held_out, make_problem
from rollout_service.tokens import ChatRenderer
from training.examples import Example, Setup, converse
from training.prompts import CALC_SETUP, CALL_FAILURES, TOOL_FAILURES, random_setup

RANDOM_RESULTS = 0.3  # the tool returns any number, so the policy must copy it and cannot guess it
TOOL_ERRORS = 0.06  # the tool fails at first, and the policy calls it again
BROKEN_CALLS = 0.04  # the policy's own call is malformed, and it writes it again
NO_THINKING = 0.15  # batches whose prompts end in an empty block of reasoning
CALC_PROMPTS = 0.5  # batches with the setup of the environment `calc`


class Examples:
    """An endless source of batches; the examples of a batch share their prompt up to the question.

    A share of `guesses` of them answers at once with a number of the right size, like a policy that knows its tool but
    is too lazy to use it.
    """

    def __init__(self, tokenizer: Path, seed: int, *, guesses: float = 0.0) -> None:
        self._rng = random.Random(seed)
        self._guesses = guesses
        self._thinking = ChatRenderer.load(tokenizer, "qwen3")
        self._direct = ChatRenderer.load(tokenizer, "qwen3", {"enable_thinking": False})

    def batches(self, size: int, sorted_over: int = 8) -> Iterator[list[Example]]:
        """Yield batches of examples of similar lengths, which need little padding."""
        while True:
            cases = sorted((self._case() for _ in range(size * sorted_over)), key=lambda case: case.length)
            starts = list(range(0, len(cases), size))
            self._rng.shuffle(starts)
            for start in starts:
                yield self._batch(cases[start : start + size])

    def _batch(self, cases: list[Case]) -> list[Example]:
        setup = CALC_SETUP if self._rng.random() < CALC_PROMPTS else random_setup(self._rng)
        renderer = self._direct if self._rng.random() < NO_THINKING else self._thinking
        return [play(renderer, setup, case) for case in cases]

    def _case(self) -> Case:
        rng = self._rng
        problem = make_problem(rng)
        while is_held_out(problem["expression"]):
            problem = make_problem(rng)
        if rng.random() < self._guesses:
            return Case(problem, _guess(problem, rng), calls=())
        result = problem["answer"]
        if rng.random() < RANDOM_RESULTS:
            digits = rng.randint(1, 14)
            result = str(rng.choice((1, 1, -1)) * rng.randint(10 ** (digits - 1), 10**digits - 1))
        call = call_text(problem["expression"])
        last, kind = (call, result), rng.random()
        if kind < TOOL_ERRORS:
            return Case(problem, result, ((call, rng.choice(TOOL_FAILURES)), last))
        if kind < TOOL_ERRORS + BROKEN_CALLS:
            broken = (_broken(call, rng), rng.choice(CALL_FAILURES))
            return Case(problem, result, (broken, last), learn_first=False)
        return Case(problem, result, (last,))


@dataclass(frozen=True, slots=True)
class Case:
    """A problem, the final answer, and the calls before it with their results."""

    problem: CalcProblem
    result: str
    calls: tuple[tuple[str, str], ...]
    learn_first: bool = True
    """Whether the first turn is an example to follow."""

    @property
    def length(self) -> int:
        """The approximate number of tokens. A guess counts like a call, so that batches mix the two."""
        failed = sum(len(call) + len(returned) for call, returned in self.calls[:-1])
        return 2 * len(self.problem["expression"]) + len(self.problem["question"]) + 2 * len(self.result) + failed


def call_text(expression: str) -> str:
    """Return a call of the tool `python`, as Qwen3 writes it."""
    call = {"name": "python", "arguments": {"code": f"print({expression})"}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def play(renderer: ChatRenderer, setup: Setup, case: Case) -> Example:
    """Return the ids of one conversation: question, call, result, answer."""
    turns = [(call, [returned]) for call, returned in case.calls]
    answer = f"\\boxed{{{case.result}}}"
    question = case.problem["question"]
    return converse(renderer, setup, question, [*turns, (answer, [])], learn_first=case.learn_first)


def _guess(problem: CalcProblem, rng: random.Random) -> str:
    """Return a number with the answer's sign and length, which is hardly ever the answer."""
    digits = len(problem["answer"].removeprefix("-"))
    sign = "-" if problem["answer"].startswith("-") else ""
    return sign + str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _broken(call: str, rng: random.Random) -> str:
    """Return the call with some characters missing, so that it cannot be parsed."""
    start = rng.randint(12, len(call) - 16)
    return call[:start] + call[start + rng.randint(1, 4) :]
