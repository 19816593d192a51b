"""The splits of a data set, such as `train` and `held_out`.

An instance belongs to the split named in its field `split`. Guarantee: no instance is in two splits, and a data set
with splits is only ever read one split at a time, so nobody trains on held-out tasks by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError, did_you_mean

SPLIT = "split"
Instance = dict[str, JsonValue]


def get_split(instance: Instance) -> str | None:
    """Return the split of an instance, or None."""
    name = instance.get(SPLIT)
    return name if isinstance(name, str) else None


def count_splits(dataset: Sequence[Instance]) -> dict[str, int]:
    """Count the instances of each split, in order of appearance; empty for a data set without splits."""
    return dict(Counter(name for name in map(get_split, dataset) if name is not None))


def select_split(dataset: Sequence[Instance], split: str | None, *, field: str) -> list[Instance]:
    """Return the instances of a split, or all instances of a data set without splits.

    Raises:
        InvalidFieldError: There is no such split, or one must be named; the path is `field`.
    """
    known = count_splits(dataset)
    if split is None and not known:
        return list(dataset)
    if split in known:
        return [instance for instance in dataset if get_split(instance) == split]
    there = ", ".join(f"{name} ({count})" for name, count in known.items())
    message = (
        "the data set has splits, and none is named"
        if split is None
        else f"the data set has no split {split!r}{did_you_mean(split, known)}"
    )
    hint = f"Its splits: {there}." if known else "It has no splits: leave the field out."
    raise InvalidFieldError([FieldError(path=field, message=message)], hint=hint)
