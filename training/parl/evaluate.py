"""Measure an orchestrator and its sub-agents on held-out tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import torch
import transformers

from rollout_service.environments.builtin import pointers, split
from rollout_service.environments.builtin.lookups import LookupProblem, as_instance, sample_problems
from rollout_service.tokens import ChatRenderer, Conversation
from training.model import load_model
from training.parl.play import Attempt, PlayedTask, roll_out, run_subagents
from training.parl.scripts import FOLLOW, READ
from training.parl.setups import POINTERS, SPLIT

GROUP = 8
STRATEGIES = ("direct", "serial", "wide")


def measure(folder: Path, count: int, *, thorough: bool = True) -> dict[str, float]:
    """Return the outcomes at temperature 1; `thorough` adds tokens, and groups of 8 that are worth training on."""
    torch.manual_seed(0)
    model, renderer = load_model(folder), ChatRenderer.load(folder)
    figures = _subagents(model, renderer, count)
    for name, tasks in (("pointers", _pointers(count)), ("split", _split(count))):
        attempts = roll_out(model, renderer, tasks, 1.0)
        figures |= {f"{name}_{key}": figure for key, figure in _figures(attempts).items()}
        if thorough:
            figures |= {f"{name}_{key}": figure for key, figure in _details(attempts).items()}
            groups = roll_out(model, renderer, [task for task in tasks[:48] for _ in range(GROUP)], 1.0)
            wins = [sum(a.success for a in groups[i : i + GROUP]) for i in range(0, len(groups), GROUP)]
            figures[f"{name}_mixed_groups"] = _share(0 < won < GROUP for won in wins)
    return figures


def _pointers(count: int) -> list[PlayedTask]:
    return [
        PlayedTask(POINTERS, p["question"], p["cells"], pointers.environment.expected(as_instance(p)))
        for p in _sample(pointers, 4242, count)
    ]


def _split(count: int) -> list[PlayedTask]:
    return [
        PlayedTask(
            SPLIT,
            p["question"],
            p["cells"],
            split.environment.expected(as_instance(p)),
            split.index_text(p["names"]),
        )
        for p in _sample(split, 4242, count)
    ]


def _sample(module: ModuleType, seed: int, count: int) -> list[LookupProblem]:
    return sample_problems(module.make_problem, module.SIZES, seed, count, held_out=True)


def _subagents(model: transformers.Qwen3ForCausalLM, renderer: ChatRenderer, count: int) -> dict[str, float]:
    rng = random.Random(4242)
    follow = [(FOLLOW, rng.choice(p["names"]), p["cells"]) for p in _sample(pointers, 4243, count)]
    read = [(READ, " ".join(p["names"][: rng.randint(1, 3)]), p["cells"]) for p in _sample(split, 4243, count)]
    return {
        "sub_pointers": _share(sub.right for sub in run_subagents(model, renderer, follow)),
        "sub_split": _share(sub.right for sub in run_subagents(model, renderer, read)),
    }


def _figures(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the outcome, how often each strategy was chosen, and how often it answered rightly at any cost."""
    figures = {"perf": _share(a.success for a in attempts)}
    for size in sorted({_size(a) for a in attempts}):
        figures[f"perf_{size}"] = _share(a.success for a in attempts if _size(a) == size)
    for strategy in STRATEGIES:
        chosen = [a for a in attempts if a.strategy == strategy]
        figures[strategy] = _share(a.strategy == strategy for a in attempts)
        if chosen:
            figures[f"{strategy}_perf"] = _share(a.success for a in chosen)
    return figures


def _details(attempts: Sequence[Attempt]) -> dict[str, float]:
    turns = sum(len(_turns(a)) for a in attempts)
    figures = {
        "wide_turns": round(sum(width > 1 for a in attempts for width in a.widths) / turns, 4),
        "steps": _mean(a.steps for a in attempts),
        "malformed": sum(a.malformed for a in attempts),
    }
    for strategy in STRATEGIES:
        chosen = [a for a in attempts if a.strategy == strategy]
        if chosen:
            figures[f"{strategy}_tokens"] = _mean(sum(_turns(a)) for a in chosen)
            figures[f"{strategy}_sub_tokens"] = _mean(
                sum(sum(_sampled(sub.conversation)) for sub in a.subs) for a in chosen
            )
    return figures


def _turns(attempt: Attempt) -> list[int]:
    return _sampled(attempt.conversation)


def _sampled(conversation: Conversation) -> list[int]:
    """Return the number of tokens sampled in each turn."""
    counts: Counter[int] = Counter()
    for segment in conversation.trajectory().segments:
        counts.update(turn for turn in segment.turn_ids if turn >= 0)
    return [counts[turn] for turn in sorted(counts)]


def _size(attempt: Attempt) -> int:
    return len(attempt.task.cells) // (1 if attempt.task.index else 2)


def _share(flags: Iterable[bool]) -> float:
    return _mean(map(float, flags))


def _mean(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return round(sum(values) / len(values), 4) if values else 0.0
