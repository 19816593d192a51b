"""Which things to give up when all together are larger than a budget: least recently used first."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """Something that takes space."""

    kind: Literal["image", "unpacked"]
    name: str
    size_bytes: int
    last_used: float
    """Unix time."""

    of: str = ""
    """What it was made from."""

    rank: int = 0
    """What has the lower one goes first, whenever it was used."""

    kept: str = ""
    """Why it must stay; empty if it may go."""

    evicted: bool = False


def choose_evictions(
    candidates: Iterable[EvictionCandidate], budget_bytes: int | None
) -> list[EvictionCandidate]:
    """All candidates in the order in which they go; `evicted` is set for as few of the first as it takes.

    What must stay counts, too, so that the budget may be missed. None is no budget: nothing goes.
    """
    ordered = sorted(candidates, key=lambda one: (one.rank, one.last_used, one.name))
    excess = 0 if budget_bytes is None else sum(one.size_bytes for one in ordered) - budget_bytes
    decided = []
    for one in ordered:
        evicted = excess > 0 and not one.kept
        if evicted:
            excess -= one.size_bytes
        decided.append(replace(one, evicted=evicted))
    return decided
