"""The colors of tokens, and the brackets and labels that replace them without loss of information."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from api_schemas.rollouts.tokens import SegmentOutline


class Coloring(StrEnum):
    MASK = "mask"
    LOGPROB = "logprob"
    VERSION = "version"
    TURN = "turn"
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    text: str
    sampled: bool
    version: int
    turn: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Mark:
    """How a token is shown; neighbors with the same key are shown as one."""

    key: Hashable
    style: str
    label: str | None = None
    """The text in brackets without colors; None for no brackets, "" for brackets alone."""


CONTEXT = Mark("context", "dim")
PALETTE = ("green", "cyan", "magenta", "yellow", "blue", "red")
SURE, UNSURE, SURPRISED = -0.1, -0.7, -2.3
"""Natural log-probabilities: 90 %, 50 % and 10 %."""


def mark(coloring: Coloring, token: Token, segment: SegmentOutline) -> Mark:
    if coloring is Coloring.SEGMENT:
        return _by_segment(token, segment)
    if not token.sampled:
        return CONTEXT
    if coloring is Coloring.MASK:
        return Mark("sampled", "green", "")
    if coloring is Coloring.VERSION:
        return Mark(token.version, _hue(token.version), f"version {token.version}")
    if coloring is Coloring.TURN:
        return Mark(token.turn, _hue(token.turn), f"turn {token.turn}")
    return _by_logprob(token)


def legend(coloring: Coloring) -> list[tuple[str, str]]:
    """Return pairs of a text and the style that it explains."""
    if coloring is Coloring.SEGMENT:
        return [("read in an earlier segment", CONTEXT.style), ("one color for each segment", PALETTE[0])]
    context = ("context", CONTEXT.style)
    if coloring is Coloring.MASK:
        return [context, ("sampled", "green")]
    if coloring is Coloring.LOGPROB:
        return [
            context,
            ("90 % or more", "green"),
            ("50 %", "yellow"),
            ("10 %", "bright_red"),
            ("less", "bold underline red"),
        ]
    return [context, (f"one color for each {coloring}", PALETTE[1])]


def plain_legend(coloring: Coloring) -> str:
    return {
        Coloring.MASK: "⟦sampled⟧, the rest is context",
        Coloring.LOGPROB: "⟦sampled with less than 50 %, and its log-probability⟧",
        Coloring.VERSION: "⟦the version of the weights: what it sampled⟧, the rest is context",
        Coloring.TURN: "⟦the turn: what was sampled in it⟧, the rest is context",
        Coloring.SEGMENT: "⟦what is new in the segment⟧, the rest was read in an earlier one",
    }[coloring]


def _by_segment(token: Token, segment: SegmentOutline) -> Mark:
    if segment.parent is not None and token.index < segment.shared_prefix:
        return CONTEXT
    return Mark("new", _hue(segment.index), "")


def _by_logprob(token: Token) -> Mark:
    logprob = token.logprob
    if logprob is None or logprob >= SURE:
        return Mark("sure", "green")
    if logprob >= UNSURE:
        return Mark("likely", "yellow")
    style = "bright_red" if logprob >= SURPRISED else "bold underline red"
    return Mark((style, token.index), style, f"{logprob:.2f}")


def _hue(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
