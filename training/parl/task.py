"""The second task: to look up values, by itself or with sub-agents, and to be such a sub-agent."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollout_service.environments.builtin import pointers, split
from rollout_service.environments.builtin.lookups import is_held_out
from rollout_service.tokens import ChatRenderer
from training.examples import Example, Setup, converse
from training.parl import scripts
from training.parl.scripts import Mixture, Script
from training.parl.setups import POINTERS, SPLIT, SUB_FOLLOW, SUB_READ
from training.tokenizer import TOOLS_TEXT, build_tokenizer

NEVER_MERGED: Final = r"[0-9+]|(?<![A-Za-z])[A-Z](?![A-Za-z])"
"""Names and values are copied letter by letter and digit by digit."""
PIECES: Final = 768
"""Enough for the texts around names and values to be a few tokens, in calls and in the prompt."""
KINDS: Final = {"pointers": 4, "split": 3, "sub_follow": 2, "sub_read": 2}
"""The kinds of batches, by how often they come."""


@dataclass(frozen=True, slots=True)
class ParlTask:
    """A policy that is an orchestrator with this mixture of strategies, and a sub-agent of itself."""

    mixture: Mixture

    def build_tokenizer(self, folder: Path) -> int:
        build_tokenizer(folder, _corpus(), PIECES, NEVER_MERGED, within_words=False)
        return PIECES

    def batches(self, tokenizer: Path, seed: int, size: int) -> Iterator[list[Example]]:
        rng, renderer = random.Random(seed), ChatRenderer.load(tokenizer, "qwen3")
        while True:
            (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
            yield [_example(renderer, *make_script(kind, self.mixture, rng)) for _ in range(size)]

    def evaluate(self, folder: Path, problems: int) -> dict[str, float]:
        from training.parl.evaluate import measure

        return measure(folder, problems, thorough=False)


def make_script(kind: str, mixture: Mixture, rng: random.Random) -> tuple[Setup, Script]:
    """Return a conversation of this kind about a problem that is not held out, and its setup."""
    module = split if kind in ("split", "sub_read") else pointers
    problem = module.make_problem(rng, rng.choice(module.SIZES))
    while is_held_out(problem):
        problem = module.make_problem(rng, rng.choice(module.SIZES))
    match kind:
        case "pointers":
            return POINTERS, scripts.follow(problem, mixture.choose(rng), rng)
        case "split":
            blind = rng.random() < mixture.blind
            return SPLIT, scripts.divide(problem, mixture.choose(rng), rng, blind)
        case "sub_follow":
            return SUB_FOLLOW, scripts.sub_follow(problem, rng)
        case _:
            return SUB_READ, scripts.sub_read(problem, rng)


def _example(renderer: ChatRenderer, setup: Setup, script: Script) -> Example:
    return converse(renderer, setup, script.question, script.turns)


def _corpus(scripts_of_each: int = 300, prompts: int = 20) -> Iterator[str]:
    """Yield the texts between control tokens, so that the merges are those that encoding uses."""
    rng, mixture = random.Random(0), Mixture()
    for _ in range(scripts_of_each):
        for kind in KINDS:
            _, script = make_script(kind, mixture, rng)
            yield f"user\n{script.question}"
            for text, results in script.turns:
                yield "assistant\n"
                yield from _between_controls(text)
                yield "user\n"
                yield from (f"\n{result}\n" for result in results)
    for _ in range(prompts):
        for system, tools in (POINTERS, SPLIT, SUB_FOLLOW, SUB_READ):
            listed = "\n".join(map(json.dumps, tools))
            text = TOOLS_TEXT.replace("\n</tools>", f"\n{listed}\n</tools>")
            yield from _between_controls(f"system\n{system + chr(10) * 2 if system else ''}{text}")


def _between_controls(text: str) -> Iterator[str]:
    return filter(None, re.split("</?tool_call>", text))
