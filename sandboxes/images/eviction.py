"""Chooses the items to evict when all together exceed a budget: least recently used first."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sandboxes.images.shared_folder import SharedFolder


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    kind: Literal["image", "unpacked", "layer"]
    name: str
    size_bytes: int
    last_used: float
    """Unix time."""

    of: str = ""
    rank: int = 0
    """Lower ranks go first, whenever they were used."""

    useless: bool = False
    """Nothing can use it any more: it goes first, whatever the budget."""

    kept: str = ""
    """Why it must stay; empty if it may be evicted."""

    evicted: bool = False


def why_recent(age: float, grace_seconds: float) -> str:
    """Return why an item that was used `age` seconds ago must stay, if it must."""
    return f"used {age:.0f} s ago" if age < grace_seconds else ""


def choose_evictions(candidates: Iterable[EvictionCandidate], budget_bytes: int | None) -> list[EvictionCandidate]:
    """Return candidates in the order of eviction, with `evicted` set for as few as the budget requires.

    Items that must stay count too, so the budget may be exceeded. Without a budget (None) only useless items are
    evicted.
    """
    ordered = sorted(candidates, key=lambda one: (not one.useless, one.rank, one.last_used, one.name))
    excess = 0 if budget_bytes is None else sum(one.size_bytes for one in ordered) - budget_bytes
    decided = []
    for one in ordered:
        evicted = (one.useless or excess > 0) and not one.kept
        if evicted:
            excess -= one.size_bytes
        decided.append(replace(one, evicted=evicted))
    return decided


def evict(
    shared: SharedFolder,
    candidates: Iterable[EvictionCandidate],
    budget_bytes: int | None,
    remove: Callable[[str], None],
    *,
    dry_run: bool,
) -> Sequence[EvictionCandidate]:
    """Remove items of a shared folder until all fit the budget, and always the leftovers of dead makers.

    The folder is locked meanwhile.
    """
    if not shared.root.is_dir():
        return ()
    if not dry_run:
        shared.remove_dead_drafts()
    with shared.lock("store"):
        decided = choose_evictions(candidates, budget_bytes)
        for one in decided:
            if one.evicted and not dry_run:
                remove(one.name)
    return decided
