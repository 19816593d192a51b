"""Measure what a policy answers in sessions of eight turns."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rollout_service.tokens import ChatRenderer
from training.live import talk
from training.live.play import Session, play
from training.live.task import MAX_TURNS
from training.model import load_model


def measure(folder: Path, count: int) -> dict[str, float]:
    """Return the shares of right answers, of each ending, and of answers that obey a hint."""
    torch.manual_seed(0)
    rng = random.Random(4242)
    model, renderer = load_model(folder), ChatRenderer.load(folder)
    sessions = play(model, renderer, count, MAX_TURNS, rng)
    figures = {"right": _right(sessions), "right_at_last": _right(sessions, -1)}
    for ending in talk.ENDINGS:
        figures[f"ends_{ending}"] = _ends(sessions, ending)
    for ending in talk.ENDINGS:
        hinted = play(model, renderer, count // 4, 1, rng, hint=talk.hint(ending))
        figures[f"obeys_{ending}"] = _ends(hinted, ending)
    return figures


def _right(sessions: Sequence[Session], first: int = 0) -> float:
    return _share(
        talk.is_right(question, answer)
        for each in sessions
        for question, answer in list(zip(each.questions, each.answers, strict=True))[first:]
    )


def _ends(sessions: Sequence[Session], ending: str) -> float:
    return _share(talk.ending_of(answer) == ending for each in sessions for answer in each.answers)


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return round(sum(found) / len(found), 4)
