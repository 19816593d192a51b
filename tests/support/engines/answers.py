"""Answers of engines with a flaw."""

from collections.abc import Sequence
from typing import Any


def with_value(answer: Any, path: Sequence[str | int], value: object) -> Any:
    """Return the answer with another value at a path."""
    *parents, last = path
    place = answer
    for part in parents:
        place = place[part]
    place[last] = value
    return answer
