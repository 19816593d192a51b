"""The first task: to answer the questions of the environment `calc` with the tool `python`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout_service.environments.builtin.calc import make_problem, sample_problems
from rollout_service.tokens import ChatRenderer
from training.data import Examples
from training.examples import Example
from training.model import load_model
from training.prompts import CALC_SETUP, CALL_FAILURES, TOOL_FAILURES, random_setup
from training.rollouts import roll_out
from training.tokenizer import TOOLS_TEXT, build_tokenizer

NEVER_MERGED = r"[0-9+\-*/().=]"
"""A number is copied digit by digit, and a bracket never merges with a digit."""
PIECES = 512


@dataclass(frozen=True, slots=True)
class CalcTask:
    """A policy that calculates; a share of `guesses` of its examples answers without the tool."""

    guesses: float = 0.0

    def build_tokenizer(self, folder: Path) -> int:
        build_tokenizer(folder, _corpus(), PIECES, NEVER_MERGED, within_words=True)
        return PIECES

    def batches(self, tokenizer: Path, seed: int, size: int) -> Iterator[list[Example]]:
        return Examples(tokenizer, seed, guesses=self.guesses).batches(size)

    def evaluate(self, folder: Path, problems: int) -> dict[str, float]:
        """Return the success, greedy and at temperature 1."""
        model, renderer = load_model(folder), ChatRenderer.load(folder)
        held_out = sample_problems(7, problems, held_out=True)
        shares = {}
        for name, temperature in (("greedy", 0.0), ("temperature_1", 1.0)):
            attempts = roll_out(model, renderer, CALC_SETUP, held_out, temperature)
            shares[name] = round(sum(attempt.success for attempt in attempts) / problems, 3)
        return shares


def _corpus(setups: int = 600) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(setups):
        problem = make_problem(rng)
        system, tools = random_setup(rng)
        yield f"system\n{system}\n\n{TOOLS_TEXT}\n" + "\n".join(map(json.dumps, tools))
        yield f"user\n{problem['question']}"
        yield f'assistant\n{{"name": "python", "arguments": {{"code": "print({problem["expression"]})"}}}}\n'
        yield f"\n{problem['answer']}\n\\boxed{{{problem['answer']}}}"
        yield rng.choice(TOOL_FAILURES + CALL_FAILURES)
